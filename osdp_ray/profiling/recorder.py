"""Records the allocator events of a module under fake tensors: what a real run would allocate and free, in order.

Nothing of the model's size is allocated. Every storage that an operation creates is an ALLOC, its end a FREE; hooks
mark where FSDP2's own hooks would run. Two things that fake tensors do otherwise than real ones are put right here:

- autograd accumulates a second gradient in place where it holds the only reference, but never under a dispatch mode;
  the out-of-place `add` that replaces it is undone.
- some CPU kernels allocate a workspace inside; `workspaces.py` gives its size as a WORKSPACE event.
"""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from osdp_ray.profiling.workspaces import workspace_bytes
from osdp_ray.records.profile import ALLOC, ENTER, EXIT, FREE, GRADIENT, POST_BACKWARD, PRE_BACKWARD, WORKSPACE


@dataclasses.dataclass
class Event:
    """One event. `subject` is a module's path for hooks, a parameter's for GRADIENT; `buffer` is a running number."""

    code: int
    buffer: int = -1
    num_bytes: int = 0
    subject: Any = None


BACKWARD = -1  # code of the mark between forward and backward; it never leaves profiling


class Recorder(TorchDispatchMode):
    """A dispatch mode that appends to `events`; see the module's docstring. Enter it inside a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.order: list[str] = []  # modules in the order in which they were entered, stubs too
        self.recording = True
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._num_buffers = 0
        self._foreign: set[int] = set()
        self._undo: tuple[int, int] | None = None  # (old buffer, new buffer) of an add that may have been in place
        self._aliases: dict[int, int] = {}

    def own(self, tensors: Any) -> None:
        """Declares storages (parameters, buffers, the batch) that are there before and are no events."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, torch.Tensor):
                self._foreign.add(leaf.untyped_storage()._cdata)

    def mark(self, code: int, subject: Any) -> None:
        if self.recording:
            self._undo = None
            self.events.append(Event(code=code, subject=subject))

    def buffer_of(self, tensor: torch.Tensor) -> int:
        """The running number of a tensor's storage, -1 if it is not one of ours."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return self._aliases.get(entry[0], entry[0]) if entry is not None else -1

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.recording:
            return result
        self._undo = None
        workspace = workspace_bytes(function, args, result)
        if workspace:
            self.events.append(Event(code=WORKSPACE, num_bytes=workspace))
        new = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                new += self._see(leaf)
        if function is torch.ops.aten.add.Tensor and new and torch._C._current_graph_task_id() != -1:
            old = self.buffer_of(args[0])
            if old >= 0 and args[0].shape == result.shape:
                self._undo = (old, new[0])
        return result

    def _see(self, tensor: torch.Tensor) -> list[int]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._foreign:
            return []
        number = self._num_buffers
        self._num_buffers += 1
        self._live[key] = (number, weakref.ref(storage, lambda _: self._gone(key, number)))
        self.events.append(Event(code=ALLOC, buffer=number, num_bytes=storage.nbytes()))
        return [number]

    def _gone(self, key: int, number: int) -> None:
        self._live.pop(key, None)
        if not self.recording:
            return
        number = self._aliases.get(number, number)
        if self._undo is not None and number == self._undo[0]:
            self._undo_add(number, self._undo[1])
            return
        self.events.append(Event(code=FREE, buffer=number))

    def _undo_add(self, old: int, new: int) -> None:
        """The add was in place: its result lives in the old buffer, and nothing was allocated or freed."""
        self._undo = None
        if self.events and self.events[-1].code == ALLOC and self.events[-1].buffer == new:
            self.events.pop()
            self._aliases[new] = old
        else:
            self.events.append(Event(code=FREE, buffer=old))


class _MarkPostBackward(torch.autograd.Function):
    """Sits where FSDP2 puts its RegisterPostBackwardFunction: on the inputs of a module."""

    @staticmethod
    def forward(ctx: Any, mark: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.mark = mark
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.mark()
        return None, *gradients


def attach_hooks(recorder: Recorder, name: str, module: nn.Module) -> list[Any]:
    """Marks a module's entries, exits and backward at the places where FSDP2's hooks would run."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder.order.append(name)
        recorder.mark(ENTER, name)
        if not torch.is_grad_enabled():
            return None
        tensors = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not tensors:
            return None
        marked = iter(_MarkPostBackward.apply(lambda: recorder.mark(POST_BACKWARD, name), *tensors))
        return tree_map(
            lambda leaf: next(marked) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf, (args, kwargs)
        )

    def after(_: nn.Module, args: Any, output: Any) -> None:
        recorder.mark(EXIT, name)
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: recorder.mark(PRE_BACKWARD, name))

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def attach_gradient_hook(recorder: Recorder, parameter: nn.Parameter, name: str) -> Any:
    """Marks which buffer holds a parameter's gradient once autograd has accumulated it."""

    def accumulated(holder: torch.Tensor) -> None:
        if holder.grad is not None:
            recorder.events.append(Event(code=GRADIENT, buffer=recorder.buffer_of(holder.grad), subject=name))

    return parameter.register_post_accumulate_grad_hook(accumulated)
