"""Contestants take turns: A B C, B C A, C A B ... so that a machine that wanders harms all alike.

Each is a long-lived process that sleeps between its turns. They start one after another, so compile times are measured
alone. When memory is short the field is split into heats; the reference runs in every heat, and every ratio is taken
against the reference of the same heat.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ceiling import Product, products
from benchmarks.contestants import HOUSE, MODULES, Contestant, Shape
from noonsight.model.count import count
from noonsight.plan import child

ALLOCATOR = {"GLIBC_TUNABLES": ":".join(child.ALLOCATOR)}  # the same for all; each of them gains from it
MARGIN_MIB = 2048
GROWTH = 1.6  # memory of a worker in the end over that after its first step, at most (measured: 1.5)
LEARNED = 0.05  # nats that the loss must have fallen: less is no training
PARAMETERS_WITHIN = 0.002  # gains and biases are counted differently by everyone; nothing else is


@dataclass(kw_only=True, eq=False)
class Score:
    """What one contestant did: seconds of its measured steps by (heat, round), or why it does not count."""

    contestant: Contestant
    rounds: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    ready: dict[str, Any] = field(default_factory=dict)
    peak_mib: float = 0.0
    rejected: str | None = None


class Died(Exception):
    """A worker ended or answered nonsense; the message is the end of what it said."""


class Worker:
    """One process that answers one JSON line with another."""

    def __init__(self, python: Path, module: str, environment: dict[str, str], job: dict[str, Any], scratch: Path):
        self.log = tempfile.TemporaryFile("w+", dir=scratch)
        self.process = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=HOUSE,
            env={**os.environ, **_environment(scratch), **environment},
        )
        self.ready = self.ask({"build": job})["ready"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, wait for its answer. Raises Died."""
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self.process.wait()
            self.log.seek(0)
            said = [line for line in self.log.read().splitlines() if line.strip()]
            raise Died(said[-1][:300] if said else f"exit {self.process.returncode} without a word") from None

    def stop(self) -> None:
        """End the process and wait until its memory is free."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # it was dead before and a request still lies in the pipe
            self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


@dataclass(kw_only=True)
class Contest:
    """One shape's contest. `pythons` maps each side to an interpreter; sides without one were left out before."""

    shape: Shape
    field: list[Contestant]
    pythons: dict[str, Path]
    num_rounds: int
    steps_per_turn: int
    ceiling_s: float
    seed: int
    say: Callable[[str], None]

    def run(self) -> tuple[list[Score], list[Product], list[dict[str, Any]]]:
        """Scores in the order of the field, the products of the ceiling, and one table of rates per round."""
        scores = [Score(contestant=contestant) for contestant in self.field]
        found, rates = products(self.field[0].config, self.shape.batch_size), []
        waiting, heat = scores[1:], 0
        with tempfile.TemporaryDirectory(prefix="noonsight-bench-") as folder:
            scratch = Path(folder)
            reference = self._start(scores[0], scratch)
            if reference is None:
                raise RuntimeError(f"the reference {scores[0].contestant.name} does not run: {scores[0].rejected}")
            job = {"products": [product[1:5] for product in found]}
            ruler = Worker(Path(sys.executable), "benchmarks.rates", {}, job, scratch)
            try:
                while waiting or heat == 0:
                    workers = {0: reference, **self._admit(scores, waiting, scratch)}
                    self._take_turns(scores, workers, heat, ruler, rates)
                    for index, worker in workers.items():
                        if index:
                            worker.stop()
                    heat += 1
            finally:
                reference.stop()
                ruler.stop()
        for score in scores:
            score.rejected = score.rejected or _reason_to_reject(score)
        return scores, found, rates

    def _admit(self, scores: list[Score], waiting: list[Score], scratch: Path) -> dict[int, Worker]:
        """Start those who still wait, as long as memory lasts; at least one."""
        admitted: dict[int, Worker] = {}
        while waiting:
            largest = GROWTH * max(score.peak_mib for score in scores)
            will_grow = (GROWTH - 1) * sum(scores[index].peak_mib for index in [0, *admitted])
            if admitted and available_mib() < largest + will_grow + MARGIN_MIB:
                break
            score = waiting.pop(0)
            worker = self._start(score, scratch)
            if worker is not None:
                admitted[scores.index(score)] = worker
        return admitted

    def _start(self, score: Score, scratch: Path) -> Worker | None:
        contestant = score.contestant
        python = self.pythons[contestant.side]
        try:
            job = contestant.job(self.shape, self.seed)
            worker = Worker(python, MODULES[contestant.side], contestant.environment, job, scratch)
        except Died as died:
            score.rejected = f"does not run: {died}"
            self.say(f"  {contestant.name}: {score.rejected}")
            return None
        score.ready = worker.ready
        self._note(score, worker.ready)
        self.say(f"  {contestant.name}: ready, first step {worker.ready['seconds'][0]:.1f} s")
        return worker

    def _take_turns(
        self, scores: list[Score], workers: dict[int, Worker], heat: int, ruler: Worker, rates: list[dict[str, Any]]
    ) -> None:
        order = list(workers)
        for turn in range(self.num_rounds):
            rates.append(ruler.ask({"seconds": self.ceiling_s})["rates"])
            for index in order[turn % len(order) :] + order[: turn % len(order)]:
                if scores[index].rejected:
                    continue
                try:
                    answer = workers[index].ask({"steps": 1 + self.steps_per_turn})
                except Died as died:
                    scores[index].rejected = f"died in round {turn + 1}: {died}"
                    continue
                self._note(scores[index], answer)
                # the first step of a turn finds the caches full of another's data
                scores[index].rounds[heat, turn] = answer["seconds"][1:]
            self.say(
                f"  heat {heat + 1}, round {turn + 1}/{self.num_rounds}, tokens/s: {self._speeds(scores, (heat, turn))}"
            )

    def _speeds(self, scores: list[Score], turn: tuple[int, int]) -> str:
        tokens = self.shape.batch_size * self.shape.sequence_length
        fast = {s.contestant.name: tokens / median(s.rounds[turn]) for s in scores if turn in s.rounds}
        return ", ".join(f"{name} {speed:.0f}" for name, speed in fast.items())

    def _note(self, score: Score, answer: dict[str, Any]) -> None:
        score.losses += answer["losses"]
        score.peak_mib = answer["peak_mib"]


def _reason_to_reject(score: Score) -> str | None:
    """A contestant must be of the counted shape and must learn."""
    counted, has = count(score.contestant.config).total_parameters, score.ready["num_parameters"]
    if abs(has / counted - 1) > PARAMETERS_WITHIN:
        return f"has {has:,} parameters where {counted:,} were counted: another shape"
    if not all(map(math.isfinite, score.losses)):
        return "its loss is not finite"
    fallen = score.losses[0] - sum(score.losses[-4:]) / len(score.losses[-4:])
    if fallen < LEARNED:
        return f"its loss fell by {fallen:.3f} nats only: it does not train"
    return None


def _environment(scratch: Path) -> dict[str, str]:
    cores = str(len(os.sched_getaffinity(0)))
    return {
        **ALLOCATOR,
        "PYTHONPATH": str(HOUSE),
        "OMP_NUM_THREADS": cores,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # compile times are those of a first run, on every side
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }


def available_mib() -> float:
    """Memory that can be taken without swapping, MiB."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable"))


def missing(sides: Iterable[str], pythons: dict[str, Path]) -> dict[str, str]:
    """Sides whose interpreter does not exist -> what to do about it."""
    return {
        side: f"no interpreter at {pythons[side]}; `make bench-envs` makes it, or give --{side}-python"
        for side in sides
        if not pythons[side].exists()
    }
