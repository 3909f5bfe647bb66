"""Saves of a training loop: at once, or in the background while training goes on.

In the background the state is copied first, into host memory of its own that is given back once it is written; then a
thread writes it and commits, over a process group of its own, so that its messages never meet the training's. At most
one save is in flight: the next one waits for it.
"""

import dataclasses
import mmap
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from osdp_ray.errors import SaveError
from osdp_ray.execution.save_tensors import Offsets
from osdp_ray.execution.saves import Save, Snapshot, reason, snapshot, write

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A save that has ended: `path` is where it is, or `error` says why it is nowhere. `stall_s` of the `seconds` the
    training waited for it."""

    step: int
    path: Any
    error: SaveError | None
    seconds: float
    stall_s: float

    @property
    def note(self) -> tuple[str, dict[str, Any]]:
        """What the driver is told: 'saved' or 'save_failed', and the facts."""
        facts = {"step": self.step, "seconds": self.seconds, "stall_s": self.stall_s}
        if self.error is None:
            return "saved", facts | {"path": str(self.path)}
        return "save_failed", facts | {"problem": str(self.error)}


class SaveWriter:
    """Writes the saves of one run. Every rank has one and calls the same methods in the same order.

    `step` and `path` are those of the newest committed save (which a run that goes on sets at its start), `error` says
    why a later one failed; all as of the last call of `outcomes`.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, keep: int, in_background: bool) -> None:
        self.step, self.path = 0, ""
        self.error: SaveError | None = None
        self._run_dir, self._keep, self._in_background = run_dir, keep, in_background
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []

    def start(self, facts: Save, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Writes a save, or copies what it needs and writes it in the background. How it ends is in `outcomes`."""
        start_s = time.perf_counter()
        self.wait()
        try:
            taken = snapshot(facts, model, optimizer, scheduler)
        except SaveError as error:  # on every rank alike
            self._end(facts.step, start_s, None, error=error)
            return
        if not self._in_background:
            self._write(taken, start_s, None)
            return
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        taken = copied(taken)
        stall_s = time.perf_counter() - start_s
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(taken, start_s, stall_s), name="osdp-save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until no save is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def outcomes(self) -> list[Outcome]:
        """The saves that have ended since the last call."""
        ended, self._outcomes = self._outcomes, []
        for outcome in ended:
            self.error = outcome.error
            if outcome.error is None:
                self.step, self.path = outcome.step, str(outcome.path)
        return ended

    def _write(self, taken: Snapshot, start_s: float, stall_s: float | None) -> None:
        step = taken.facts.step
        try:
            path = write(self._run_dir, taken, keep=self._keep, group=self._group)
        except SaveError as error:
            self._end(step, start_s, stall_s, error=error)
        else:
            self._end(step, start_s, stall_s, path=path)

    def _write_in_thread(self, taken: Snapshot, start_s: float, stall_s: float) -> None:
        try:
            self._write(taken, start_s, stall_s)
        except Exception as error:  # the border of a thread: the loop hears of it as of every failed save
            problem = f"its thread failed ({reason(error)})"
            wrapped = SaveError(f"of step {taken.facts.step}", problem, "Leave out --async-saves to see where")
            self._end(taken.facts.step, start_s, stall_s, error=wrapped)

    def _end(
        self, step: int, start_s: float, stall_s: float | None, *, path: Any = None, error: SaveError | None = None
    ) -> None:
        seconds = time.perf_counter() - start_s
        stall_s = seconds if stall_s is None else stall_s
        self._outcomes.append(Outcome(step=step, path=path, error=error, seconds=seconds, stall_s=stall_s))


def copied(taken: Snapshot) -> Snapshot:
    """A snapshot that no step of the optimizer changes any more.

    Its tensors lie in one block of anonymous memory: torch's allocator does not see it, and it goes back to the system
    as soon as it is written.
    """
    total = sum(_padded(values) for found in taken.pieces.values() for _, values in found)
    block = mmap.mmap(-1, max(total, 1))
    position = 0
    pieces: dict[str, list[tuple[Offsets, torch.Tensor]]] = {}
    for name, found in taken.pieces.items():
        pieces[name] = []
        for offsets, values in found:
            copy = torch.empty(values.shape, dtype=values.dtype)
            if values.numel() > 0:
                flat = torch.frombuffer(block, dtype=values.dtype, count=values.numel(), offset=position)
                copy = flat.view(values.shape)
                copy.copy_(values)
            pieces[name].append((offsets, copy))
            position += _padded(values)
    return dataclasses.replace(taken, pieces=pieces)


def _padded(values: torch.Tensor) -> int:
    return -(-values.numel() * values.element_size() // _ALIGNMENT) * _ALIGNMENT
