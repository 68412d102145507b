"""SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 ask a run to save and stop at the next update boundary."""

from __future__ import annotations

import signal
import sys
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(Exception):
    """The run stopped because a signal asked it to."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """While entered, the first signal only sets `received`; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._receive) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number
        print(f"\n{signal.Signals(number).name}: stopping at the next update boundary", file=sys.stderr)
