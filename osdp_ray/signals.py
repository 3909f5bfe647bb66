"""SIGINT and SIGTERM while a run goes on: the first one asks for a save, the second one ends it at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

_AGAIN_S = 0.05


class StopNow(KeyboardInterrupt):
    """Raised in the main thread by a signal where there is nothing to save; no `except Exception` swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class StopSignals:
    """SIGINT and SIGTERM in the main thread: raise `StopNow`, or while `deferred` is set only note the first one.

    After `ignore` they do nothing: cleaning up has begun, and is to come to its end. While a module is imported they
    wait, for modules written in C drop an exception that is raised then. What another library drops, `check` finds.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferred = False
        self._ignored = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        outer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(outer, StopSignals):
            outer.check()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def ignore(self) -> None:
        self._ignored = True

    def check(self) -> None:
        """Raises StopNow where a signal was heard and what it raised has got lost."""
        if self.received is not None and not self.deferred and not self._ignored:
            raise StopNow(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ignored:
            return
        if _is_importing(frame):
            timer = threading.Timer(_AGAIN_S, self._send_again, (number,))
            timer.daemon = True
            timer.start()
            return
        first = self.received is None
        self.received = self.received or number
        if not (first and self.deferred):
            raise StopNow(number)

    def _send_again(self, number: int) -> None:
        if signal.getsignal(number) == self._handle:
            os.kill(os.getpid(), number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
