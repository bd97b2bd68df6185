"""The loop of a run, as a lab protocol: batch, step, measurements, evaluation, checkpoint, heartbeat.

The measurements of a step are fetched while the device already works on the next one, so that it never waits for
Python; before anything looks at the state (evaluation, checkpoint, hash) the measurements of the last step are
brought in first, so a bad step is always found before its state could be kept. Replaying a step gives the same
bits: nothing here feeds back into the numbers. Order of the hooks: Marin, issue #8435.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from noonsight.train.checkpoint import Saver
from noonsight.train.config import PretrainConfig
from noonsight.train.journal import Evaluate, Journal
from noonsight.train.ranks import Ranks
from noonsight.train.recover import Interrupted
from noonsight.train.recover.faults import Faults
from noonsight.train.recover.requests import Requests
from noonsight.train.step import Measured, State, skip_step

GC_WARM_UP, GC_EVERY = 10, 100
"""Garbage is collected by all ranks at the same steps, so that no pause of one makes all wait at another time (F19)."""


@dataclass(kw_only=True)
class Surroundings:
    """What a loop works with beside the state and the step: the hands that write, and who may ask it for something."""

    saver: Saver
    journal: Journal
    faults: Faults
    requests: Requests
    ranks: Ranks = field(default_factory=Ranks)
    temporary_every_s: float = 0.0
    """Wall time between temporary checkpoints; rank 0's clock counts. 0: none."""


def run_loop(
    state: State,
    config: PretrainConfig,
    *,
    train_step: Callable[[State, Any], tuple[State, Measured]],
    batch: Callable[[int], Any],
    evaluate: Evaluate | None,
    around: Surroundings,
    last_step: int | None = None,
) -> State:
    """Run the steps that are left before `last_step` (None: the run's end) and return the state after them. What belongs
    to the run's very last step (evaluation, checkpoint) is the caller's.

    Raises BadStep, and Interrupted (once the state is saved) when the process was asked to end.
    """
    journal, saver, ranks = around.journal, around.saver, around.ranks
    first, end = int(state.step), config.num_steps if last_step is None else last_step
    skipped = {int(step) for step in state.skipped}
    clock = _SaveClock(around.temporary_every_s)
    with _coordinated_garbage(first) as collect_garbage:
        try:
            for step in range(first, end):
                if step in skipped:
                    state = skip_step(state)
                    journal.passed_over(step)
                    continue
                asked = ranks.next_turn(around.requests.take() | {"save": ranks.first and clock.is_due()})
                if "stop" in asked:
                    raise Interrupted
                if "save" in asked and step > first:
                    journal.write_pending()
                    journal.save(step, saver, state, "temporary")
                    clock.restart()
                with journal.own_time(), around.requests.may_interrupt():
                    data = around.faults.before(step, batch(step))
                state, measured = train_step(state, data)
                journal.write_pending()  # the step before this one
                journal.take(step, data, measured)
                _after(step, state, config, evaluate, around)
                collect_garbage(step)
            journal.write_pending()
        except Interrupted:
            journal.write_pending()
            if int(state.step) > first:
                journal.save(int(state.step), saver, state, "temporary")
                saver.join()
            raise
    return state


def _after(step: int, state: State, config: PretrainConfig, evaluate: Evaluate | None, around: Surroundings) -> None:
    """What is due once `step` is complete."""
    journal, saver, done = around.journal, around.saver, step + 1
    evaluating = evaluate is not None and _due(done, config.evaluate_every) and done < config.num_steps
    saving = _due(done, config.checkpoint_every) and done < config.num_steps
    planned = around.faults.planned(step)
    hashing = _due(done, config.hash_every) or done == config.num_steps or planned
    if not (evaluating or saving or hashing):
        return
    journal.write_pending()
    if hashing:
        journal.hash(done, state.params)
    if evaluating and evaluate is not None:
        with around.requests.may_interrupt():
            journal.evaluate(done, evaluate, state)
    if saving:
        journal.save(done, saver, state, "permanent")
    saver.poll()
    around.faults.after(step, lambda: journal.save(done, saver, state, "temporary"))
    journal.restart_clock()


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


class _SaveClock:
    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()

    def is_due(self) -> bool:
        return self._every_s > 0 and time.monotonic() - self._since >= self._every_s


@contextlib.contextmanager
def _coordinated_garbage(first: int) -> Iterator[Callable[[int], None]]:
    """Collection by the number of the step instead of by chance; afterwards as it was."""
    was_on = gc.isenabled()

    def collect(step: int) -> None:
        turn = step - first
        if turn == GC_WARM_UP:
            gc.disable()
            gc.collect()
            gc.freeze()  # what a run keeps for ever (its trace, its executable) need not be looked through again
        elif turn > GC_WARM_UP and step % GC_EVERY == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
