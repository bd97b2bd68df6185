"""What the outside may ask a worker for while it works, as signals.

TERM, INT, HUP   end: finish the step, save, exit as "interrupted"
USR1             save now and go on: a scheduler's notice that the machine will be taken away
USR2             write the stack of every thread to the log (`recover.worker`)
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from noonsight.train.recover import Interrupted

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVE = signal.SIGUSR1


class Requests:
    """The requests that have come and were not taken yet. A step that runs is finished; a wait is broken off."""

    def __init__(self, *, alone: bool = True) -> None:
        """`alone`: no other rank trains with this one, so that it may leave whenever it wants."""
        self.stop = False
        self._alone = alone
        self._save = False
        self._waiting = False

    def listen(self) -> None:
        """Handle the signals from now on; main thread only."""
        for number in END:
            signal.signal(number, self._receive_end)
        signal.signal(SAVE, self._receive_save)

    def take(self) -> dict[str, bool]:
        """Request -> whether it was made; a request to save is made once."""
        wanted = {"stop": self.stop, "save": self._save}
        self._save = False
        return wanted

    @contextlib.contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """A stretch of code that may be left at any point. Raises Interrupted, also for a signal that came before.

        Among several ranks none leaves alone: they agree on a step.
        """
        if not self._alone:
            yield
            return
        if self.stop:
            raise Interrupted
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _receive_end(self, *_: Any) -> None:
        self.stop = True
        if self._waiting:
            raise Interrupted

    def _receive_save(self, *_: Any) -> None:
        self._save = True
