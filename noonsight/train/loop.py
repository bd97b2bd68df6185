"""The loop of a run, as a lab protocol: batch, step, measurements, evaluation, checkpoint, heartbeat.

The measurements of a step are fetched while the device already works on the next one, so that it never waits for
Python; before anything looks at the state (evaluation, checkpoint, hash) the measurements of the last step are
brought in first, so a non-finite loss is always found before its state could be kept. Replaying a step gives the same
bits: nothing here feeds back into the numbers. Order of the hooks: Marin, issue #8435.
"""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from noonsight.logbook.record import Placement
from noonsight.train.checkpoint import Saver
from noonsight.train.config import PretrainConfig
from noonsight.train.health import Health
from noonsight.train.placement import require_no_drops
from noonsight.train.recover import Faults, Interrupted
from noonsight.train.step import Measured, State, params_hash, skip_step

if TYPE_CHECKING:
    from noonsight.logbook.write import Writer

Evaluate = Callable[[Any, Any, int], dict[str, float]]
"""`evaluate(params, extra, completed steps) -> {metric: value}`, handed in from outside."""


class NonFinite(RuntimeError):
    """The loss or the gradient of a step is not a number. Its batch has been saved."""

    symptom = "non-finite"


def run_loop(
    state: State,
    config: PretrainConfig,
    *,
    train_step: Callable[[State, Any], tuple[State, Measured]],
    batch: Callable[[int], Any],
    evaluate: Evaluate | None,
    saver: Saver,
    journal: Journal,
    faults: Faults,
    stop: StopSignal,
) -> State:
    """Run the steps that are left and return the last state. The final evaluation and checkpoint are the caller's.

    Raises NonFinite, and Interrupted (once the state is saved) when the process was asked to end.
    """
    first = int(state.step)
    skipped = {int(step) for step in state.skipped}
    try:
        for step in range(first, config.num_steps):
            if step in skipped:
                state = skip_step(state)
                continue
            with stop.may_interrupt():
                data = batch(step)
            state, measured = train_step(state, data)
            journal.write_pending()  # the step before this one
            journal.take(step, data, measured)

            done = step + 1
            evaluating = evaluate is not None and _due(done, config.evaluate_every) and done < config.num_steps
            saving = _due(done, config.checkpoint_every) and done < config.num_steps
            hashing = _due(done, config.hash_every) or done == config.num_steps or faults.planned(step)
            if not (evaluating or saving or hashing):
                continue
            journal.write_pending()
            if hashing:
                journal.hash(done, state.params)
            if evaluating:
                with stop.may_interrupt():
                    journal.evaluate(done, evaluate, state)
            if saving:
                journal.save(done, saver, state, "permanent")
            saver.poll()
            faults.strike(step)
            journal.restart_clock()
        journal.write_pending()
    except Interrupted:
        journal.write_pending()
        if int(state.step) > first:
            journal.save(int(state.step), saver, state, "temporary")
            saver.join()
        raise
    return state


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


class Journal:
    """What the loop writes down: one line of measurements and one heartbeat per step, and what happens between
    steps.
    """

    def __init__(
        self,
        out: Path,
        writer: Writer,
        config: PretrainConfig,
        flops_per_token: float | None = None,
        placement: Placement = Placement(),
    ) -> None:
        """`flops_per_token`: model FLOPs of forward and backward for one token, if known."""
        self._out, self._writer, self._config, self._placement = out, writer, config, placement
        self._flops_per_token = flops_per_token
        self.health = Health(config)
        self._pending: tuple[int, Any, Measured] | None = None
        self._recent: deque[float] = deque(maxlen=20)
        self._clock = time.perf_counter()

    def take(self, step: int, data: Any, measured: Measured) -> None:
        """Remember what `step` measured, without waiting for the device."""
        self._pending = (step, data, measured)

    def write_pending(self) -> None:
        """Wait for the remembered step, check it, and write its line and heartbeat. Raises NonFinite, Dropped."""
        if self._pending is None:
            return
        (step, data, measured), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(measured).items()}
        seconds = time.perf_counter() - self._clock
        self.restart_clock()
        self._recent.append(seconds)
        finite = values.pop("finite") == 1.0
        values |= self._speed(step, seconds)
        self._writer.metrics(step, values)
        if not finite:
            self._refuse(step, data, values)
        require_no_drops(self._placement, step, values)
        for rule, sentence in self.health.look(step, values):
            self._writer.event("sentinel", sentence, cause=rule, step=step)
        self.beat(step + 1, "run", text=f"loss {values['loss']:.4f}")

    def hash(self, done: int, params: Any) -> None:
        """Record the hash of all parameters after `done` steps."""
        self._writer.event(
            "params-hash", f"Parameters after {done} steps.", step=done, data={"hash": params_hash(params)}
        )

    def evaluate(self, done: int, evaluate: Evaluate, state: State) -> dict[str, float]:
        """Evaluate the state after `done` steps and write the values down."""
        self.beat(done, "evaluate")
        values = evaluate(state.params, state.extra, done)
        self._writer.metrics(done, values)
        return values

    def save(self, done: int, saver: Saver, state: State, kind: str) -> None:
        """Start a checkpoint of the state after `done` steps and write how long the loop was held up."""
        self.beat(done, "save")
        start = time.perf_counter()
        saver.save(state, step=done, kind=kind, tokens=done * self._config.batch_tokens)
        self._writer.metrics(done, {"save_s": time.perf_counter() - start})

    def beat(self, done: int, phase: str, text: str = "") -> None:
        """One heartbeat."""
        rate = 1 / statistics.median(self._recent) if self._recent else None
        self._writer.progress(done, self._config.num_steps, unit="steps", phase=phase, rate=rate, text=text)

    def restart_clock(self) -> None:
        """The next step is timed from now: what happened between steps is not its time."""
        self._clock = time.perf_counter()

    def _speed(self, step: int, seconds: float) -> dict[str, float]:
        tokens = self._config.batch_tokens
        speed = {"tokens": float((step + 1) * tokens), "step_s": seconds, "tokens_per_s": tokens / seconds}
        if self._flops_per_token is not None:
            speed["flops_per_s"] = self._flops_per_token * tokens / seconds
        return speed

    def _refuse(self, step: int, data: Any, values: dict[str, float]) -> None:
        name = f"bad_batches/step_{step:08d}.npz"
        (self._out / name).parent.mkdir(exist_ok=True)
        leaves = {
            jax.tree_util.keystr(path, simple=True): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(data)[0]
        }
        np.savez(self._out / name, **leaves)
        culprits = ", ".join(key for key, value in values.items() if not math.isfinite(value))
        text = (
            f"Step {step} gave loss {values['loss']} and gradient norm {values['norm/grad']}; "
            f"not finite: {culprits}. Its batch is kept in {name}; no checkpoint holds its effect."
        )
        self._writer.event("non-finite", text, cause="non-finite", step=step, data={"batch": name})
        raise NonFinite(text)


class StopSignal:
    """SIGTERM as a request: a step that runs is finished, a wait (data, evaluation) is broken off."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False

    def listen(self) -> None:
        """Handle SIGTERM from now on; main thread only."""
        signal.signal(signal.SIGTERM, self._receive)

    @contextlib.contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """A stretch of code that may be left at any point. Raises Interrupted, also for a signal that came before."""
        if self.requested:
            raise Interrupted
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _receive(self, *_: Any) -> None:
        self.requested = True
        if self._waiting:
            raise Interrupted
