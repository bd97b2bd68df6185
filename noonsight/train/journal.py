"""What a run writes down: one line of measurements and one heartbeat per step, and what happens between steps.

Rank 0 writes for all; the others look at the same numbers, come to the same decisions and write only their own pace.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import xxhash

from noonsight.logbook.record import Placement, encode
from noonsight.logbook.write import append_line
from noonsight.train.checkpoint import Saver
from noonsight.train.config import PretrainConfig
from noonsight.train.health import SPIKE_STEPS, WINDOW, Health, measure_batch, spike
from noonsight.train.placement import require_no_drops
from noonsight.train.ranks import Ranks
from noonsight.train.recover.watch import RankBeat, rank_beats
from noonsight.train.step import Measured, State, params_hash

if TYPE_CHECKING:
    from noonsight.logbook.write import Writer

Evaluate = Callable[[Any, Any, int], dict[str, float]]
"""`evaluate(params, extra, completed steps) -> {metric: value}`, handed in from outside."""


class BadStep(RuntimeError):
    """A step whose batch the run must pass over. What is known of it is written down."""

    def __init__(self, text: str, symptom: str) -> None:
        super().__init__(text)
        self.symptom = symptom


class Journal:
    """The hand that writes for the loop."""

    def __init__(
        self,
        out: Path,
        writer: Writer,
        config: PretrainConfig,
        flops_per_token: float | None = None,
        placement: Placement = Placement(),
        ranks: Ranks | None = None,
    ) -> None:
        """`flops_per_token`: model FLOPs of forward and backward for one token, if known."""
        self._out, self._writer, self._config, self._placement = out, writer, config, placement
        self._part, self._flops_per_token, self.ranks = config, flops_per_token, ranks or Ranks()
        self.health = Health(config, first_loss=_first_loss(out))
        self._pending: tuple[int, Any, Measured] | None = None
        self._recent: deque[float] = deque(maxlen=20)
        self._own_s, self._batch, self._sources = 0.0, None, None
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._clock = time.perf_counter()
        if not self.ranks.alone:
            rank_beats(out, self.ranks.rank).parent.mkdir(exist_ok=True)

    def change(
        self,
        part: PretrainConfig,
        flops_per_token: float | None,
        *,
        batch: Callable[[int], Any] | None = None,
        sources: Callable[[int], Mapping[str, tuple[float, float]]] | None = None,
    ) -> None:
        """From the next step on the run is as `part` says; with `batch`, the digest of each step's whole batch is kept, with
        `sources` its sources are watched.
        """
        self._part, self._flops_per_token, self._batch, self._sources = part, flops_per_token, batch, sources
        self.health.change(part)

    @contextlib.contextmanager
    def own_time(self) -> Iterator[None]:
        """What is done here is this rank's own work, for which the others wait."""
        start = time.perf_counter()
        yield
        self._own_s = time.perf_counter() - start

    def take(self, step: int, data: Any, measured: Measured) -> None:
        """Remember what `step` measured, without waiting for the device."""
        self._pending = (step, data, measured)

    def write_pending(self) -> None:
        """Wait for the remembered step, check it, and write its line and heartbeat. Raises BadStep, Dropped."""
        if self._pending is None:
            return
        (step, data, measured), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(measured).items()}
        seconds = time.perf_counter() - self._clock
        self.restart_clock()
        self._recent.append(seconds)
        finite = values.pop("finite") == 1.0
        values |= self._speed(step, seconds) | (measure_batch(data) if self.ranks.alone else {})
        if self._batch is not None:
            values["batch_digest"] = float(batch_digest(self._batch(step)))
        if self.ranks.first:
            self._writer.metrics(step, values)
        if not finite:
            self._refuse(step, data, values)
        require_no_drops(self._placement, step, values)
        self._require_no_spike(step, values["loss"])
        self._alarm(step, self.health.look(step, values, self._sources(step) if self._sources else None))
        if not self.ranks.alone:
            beat = RankBeat(step=step, own_s=round(self._own_s, 4), step_s=round(seconds, 4))
            append_line(rank_beats(self._out, self.ranks.rank), encode(beat))
        self.beat(step + 1, "run", text=f"loss {values['loss']:.4f}")

    def passed_over(self, step: int) -> None:
        """Write down that the batch of `step` was taken and nothing learned. The line also tells readers that what an
        earlier attempt measured at this step belongs to a line of the run that was given up.
        """
        self.write_pending()
        if self.ranks.first:
            self._writer.metrics(step, {"skipped": 1.0})

    def hash(self, done: int, params: Any) -> None:
        """Record the hash of all parameters after `done` steps."""
        digest = params_hash(params)  # all ranks must come together for it
        self.event("params-hash", f"Parameters after {done} steps.", step=done, data={"hash": digest})

    def evaluate(self, done: int, evaluate: Evaluate, state: State) -> dict[str, float]:
        """Evaluate the state after `done` steps and write the values down."""
        self.beat(done, "evaluate")
        values = evaluate(state.params, state.extra, done)
        if self.ranks.first:
            self._writer.metrics(done, values)
        self._alarm(done, self.health.evaluated(done, values))
        self.beat(done, "run")  # whatever hangs from here on is no evaluation
        return values

    def save(self, done: int, saver: Saver, state: State, kind: str) -> None:
        """Start a checkpoint of the state after `done` steps and write how long the loop was held up."""
        self.beat(done, "save")
        start = time.perf_counter()
        saver.save(state, step=done, kind=kind, tokens=self._config.tokens_before(done))
        if self.ranks.first:
            self._writer.metrics(done, {"save_s": time.perf_counter() - start})
        self.beat(done, "run")

    def beat(self, done: int, phase: str, text: str = "") -> None:
        """One heartbeat."""
        if self.ranks.first:
            rate = 1 / statistics.median(self._recent) if self._recent else None
            self._writer.progress(done, self._config.num_steps, unit="steps", phase=phase, rate=rate, text=text)

    def restart_clock(self) -> None:
        """The next step is timed from now: what happened between steps is not its time."""
        self._clock = time.perf_counter()

    def event(self, kind: str, text: str, **fields: Any) -> None:
        """Write an event down once for all ranks."""
        if self.ranks.first:
            self._writer.event(kind, text, **fields)

    def _speed(self, step: int, seconds: float) -> dict[str, float]:
        tokens = self._part.batch_tokens
        speed = {
            "tokens": float(self._config.tokens_before(step + 1)),
            "step_s": seconds,
            "tokens_per_s": tokens / seconds,
        }
        if self._flops_per_token is not None:
            speed["flops_per_s"] = self._flops_per_token * tokens / seconds
        return speed

    def _alarm(self, step: int, begun: list[tuple[str, str]]) -> None:
        for rule, sentence in begun:
            self.event("sentinel", sentence, cause=rule, step=step)

    def _require_no_spike(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        z = spike(self._losses)
        if z is None or not self._config.skip_spikes:
            return
        bad = [each for each in range(step - SPIKE_STEPS + 1, step + 1) if each >= self._config.first_step]
        text = f"Step {step} gave loss {loss:.4f}, {z:.0f} robust deviations above the usual. No checkpoint holds its effect."
        self.event("bad-steps", text, cause="spike", step=step, data={"steps": bad})
        raise BadStep(text, "spike")

    def _refuse(self, step: int, data: Any, values: dict[str, float]) -> None:
        kept, known = "", {"steps": [step]}
        if self.ranks.alone:
            name = f"bad_batches/step_{step:08d}.npz"
            (self._out / name).parent.mkdir(exist_ok=True)
            leaves = {
                jax.tree_util.keystr(path, simple=True): leaf
                for path, leaf in jax.tree_util.tree_flatten_with_path(data)[0]
            }
            np.savez(self._out / name, **leaves)
            kept, known = f" Its batch is kept in {name};", known | {"batch": name}
        culprits = ", ".join(key for key, value in values.items() if not math.isfinite(value))
        text = (
            f"Step {step} gave loss {values['loss']} and gradient norm {values['norm/grad']}; "
            f"not finite: {culprits}.{kept or ' And'} no checkpoint holds its effect."
        )
        self.event("bad-steps", text, cause="non-finite", step=step, data=known)
        raise BadStep(text, "non-finite")


def _first_loss(out: Path) -> float | None:
    """The loss of the run's first step, where an earlier attempt made it."""
    with contextlib.suppress(OSError, ValueError), (out / "metrics.jsonl").open("rb") as file:
        return json.loads(file.readline()).get("loss")
    return None


def batch_digest(data: Any) -> int:
    """48 bits over the bytes of a batch, a whole number that a float64 holds: equal digests, equal samples."""
    digest = xxhash.xxh3_64()
    for leaf in jax.tree.leaves(data):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return digest.intdigest() & ((1 << 48) - 1)
