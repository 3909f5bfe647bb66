"""SIGINT and SIGTERM while a run goes on: the first one asks for a save, the second one ends it at once."""

import signal
import threading
from typing import Any, Self


class StopNow(KeyboardInterrupt):
    """Raised in the main thread by a signal where there is nothing to save; no `except Exception` swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class StopSignals:
    """SIGINT and SIGTERM in the main thread: raise `StopNow`, or while `deferred` is set only note the first one."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.install()
        return self

    def install(self) -> None:
        """Also after `ray.init`, which sets a SIGTERM handler of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.signal(number, self._handle)
            self._previous.setdefault(number, previous)

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: Any) -> None:
        first = self.received is None
        self.received = self.received or number
        if not (first and self.deferred):
            raise StopNow(number)
