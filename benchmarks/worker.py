"""The far end of a contest: one process that trains one contestant, a few steps whenever it is told to.

The conductor (`rounds.py`) writes one JSON object per line to stdin and reads one per line from stdout; between two of
them the process sleeps. This file runs in every environment, so it needs NumPy and nothing of ours.

    {"build": job}  ->  {"ready": {...what the first steps showed...}}
    {"steps": n}    ->  {"seconds": [...], "losses": [...], "peak_mib": x}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

NUM_BATCHES = 4
NUM_WARM_STEPS = 3


class Built(NamedTuple):
    """A contestant ready to train: `step(tokens i32[B, S]) -> loss`, blocking until the new weights exist."""

    step: Callable[[np.ndarray], float]
    num_parameters: int
    versions: dict[str, str]


def token_batches(*, vocab_size: int, batch_size: int, sequence_length: int, seed: int) -> list[np.ndarray]:
    """The batches every contestant sees, in turn: ids with the frequencies of words (p ~ 1 / (rank + 2)), i32[B, S]."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / (np.arange(vocab_size) + 2.0)
    ids = rng.permutation(vocab_size).astype(np.int32)
    shape = (NUM_BATCHES, batch_size, sequence_length)
    return list(ids[rng.choice(vocab_size, size=shape, p=weights / weights.sum())])


def serve(build: Callable[[dict[str, Any]], Built]) -> None:
    """Answer the conductor until it closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    job = json.loads(sys.stdin.readline())["build"]
    started = time.perf_counter()
    built = build(job)
    trainer = _Trainer(built.step, token_batches(**job["batches"]))
    built_s = time.perf_counter() - started
    first_s, *warm_s = trainer.run(1 + NUM_WARM_STEPS)
    ready = {
        "num_parameters": built.num_parameters,
        "versions": built.versions,
        "compile_s": first_s - min(warm_s),
        "build_s": built_s,
        **trainer.report([first_s, *warm_s]),
    }
    answers.write(json.dumps({"ready": ready}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(trainer.report(trainer.run(json.loads(line)["steps"]))) + "\n")


class _Trainer:
    def __init__(self, step: Callable[[np.ndarray], float], batches: list[np.ndarray]):
        self.step, self.batches, self.losses = step, batches, []

    def run(self, num_steps: int) -> list[float]:
        seconds = []
        for _ in range(num_steps):
            tokens = self.batches[len(self.losses) % len(self.batches)]
            start = time.perf_counter()
            self.losses.append(float(self.step(tokens)))
            seconds.append(time.perf_counter() - start)
        return seconds

    def report(self, seconds: list[float]) -> dict[str, Any]:
        return {"seconds": seconds, "losses": self.losses[-len(seconds) :], "peak_mib": peak_mib()}


def peak_mib() -> float:
    """Largest resident size of this process so far, MiB (VmHWM)."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
