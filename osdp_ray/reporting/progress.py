"""The progress of a run: one redrawn line on a terminal, a line now and then elsewhere.

step 120/200  loss 2.3135  84.1 samples/s  peak 101.20 MiB of 128.00 MiB  20.10 s left
"""

import time
from collections.abc import Callable
from typing import TextIO

from osdp_ray.units import format_bytes, format_seconds

_BAR_CELLS = 20
_REDRAW_S = 0.1
_LINE_S = 5.0
_LINE_FRACTION = 0.1
_SMOOTHING = 0.1  # of the newest step in the mean that speed and time left are computed from


class ProgressBar:
    """Writes to `stream`; `clock` gives seconds, for tests."""

    def __init__(
        self, stream: TextIO, num_steps: int, budget_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._num_steps, self._budget_bytes = stream, num_steps, budget_bytes
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._written_s = float("-inf")
        self._written_step = self._width = self._step = 0
        self._step_s: float | None = None
        self._peak_bytes: int | None = None
        self._line = ""

    def update(self, *, step: int, loss: float, num_samples: int, step_s: float, peak_bytes: int | None = None) -> None:
        """After a step. `num_samples` were trained on in `step_s`; `peak_bytes` is None where it was not measured."""
        mean_s = self._step_s
        self._step_s = step_s if mean_s is None else mean_s + _SMOOTHING * (step_s - mean_s)
        if peak_bytes is not None:
            self._peak_bytes = max(peak_bytes, self._peak_bytes or 0)
        self._step = step
        self._line = self._text(loss, num_samples)
        now_s = self._clock()
        since_s, is_last = now_s - self._written_s, step >= self._num_steps
        if self._is_terminal:
            is_due = since_s >= _REDRAW_S
        else:
            is_due = since_s >= _LINE_S or step - self._written_step >= _LINE_FRACTION * self._num_steps
        if is_due or is_last:
            self._write(now_s)

    def note(self, text: str) -> None:
        """A line of its own, such as of a save; the bar goes on below it."""
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Ends the redrawn line, with what came last."""
        if self._step > self._written_step:
            self._write(self._clock())
        if self._is_terminal and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def _write(self, now_s: float) -> None:
        self._written_s, self._written_step = now_s, self._step
        if self._is_terminal:
            self._stream.write("\r" + self._line.ljust(self._width))
            self._width = len(self._line)
        else:
            self._stream.write(self._line + "\n")
        self._stream.flush()

    def _text(self, loss: float, num_samples: int) -> str:
        step_s = self._step_s or 0.0
        parts = [f"step {self._step}/{self._num_steps}", f"loss {loss:.4f}"]
        if step_s > 0:
            parts.append(f"{num_samples / step_s:.1f} samples/s")
        if self._peak_bytes is not None:
            parts.append(f"peak {format_bytes(self._peak_bytes)} of {format_bytes(self._budget_bytes)}")
        if left := self._num_steps - self._step:
            parts.append(f"{format_seconds(left * step_s)} left")
        if self._is_terminal:
            done = min(_BAR_CELLS, _BAR_CELLS * self._step // max(self._num_steps, 1))
            parts.insert(0, "[" + "#" * done + "." * (_BAR_CELLS - done) + "]")
        return "  ".join(parts)
