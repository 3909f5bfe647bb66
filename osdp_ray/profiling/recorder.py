"""Records the allocator events of a module under fake tensors: what a real run would allocate and free, in order.

Nothing of the model's size is allocated. Every storage that an operation creates is an ALLOC, its end a FREE; hooks
mark where FSDP2's own hooks would run. What fake tensors do otherwise than real ones is put right here:

- autograd accumulates a second gradient in place where it holds the only reference, but never under a dispatch mode;
  the out-of-place `add` that replaces it is undone.
- some CPU kernels allocate a workspace inside; `workspaces.py` gives its size as a WORKSPACE event, and where that
  takes running it `scratch.py`.
- Python numbers in products become tensors of 8 bytes, which no dispatch mode sees and autograd keeps, past any hooks
  on what is saved; `Numbers`.
- what a block holds of its inputs, and what called it of its outputs, ends at times of its own, which depend on what
  is recomputed elsewhere; at a block's border a tensor is replaced by another one that stands for the same bytes, so
  that each holder's end is seen by itself (HOLD).
- branches that read small integer tensors go where the values lead; see `values.py`.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from osdp_ray.profiling import values
from osdp_ray.profiling.memo import Key, Memo, key_of, make, run_on_meta
from osdp_ray.profiling.scratch import call_of, is_measured
from osdp_ray.profiling.workspaces import FAKE_KERNELS, NUMBER_BYTES, workspace_bytes
from osdp_ray.records.profile import ALLOC, ENTER, EXIT, FREE, GRADIENT, HOLD, POST_BACKWARD, PRE_BACKWARD, WORKSPACE


@dataclasses.dataclass
class Event:
    """One event. `buffer` is a running number; `subject` a module's path for hooks, a parameter's for GRADIENT, and
    the operation's call of a WORKSPACE that has to be measured (see scratch).
    """

    code: int
    buffer: int = -1
    num_bytes: int = 0
    subject: Any = None


# Sees every operation that runs: the index of its first event (or of the last one before it), the operation, its
# arguments and its result, and what it depends on (see memo).
Watch = Callable[[int, Any, tuple[Any, ...], dict[str, Any], Any, Key | None], None]

BACKWARD = -1  # code of the mark between forward and backward; it never leaves profiling


class Recorder(TorchDispatchMode):
    """A dispatch mode that appends to `events`; see the module's docstring. Enter it inside a FakeTensorMode.

    `memo` has what recorders of the same mode before it found; None where tensors are real.
    """

    def __init__(self, watch: "Watch | None" = None, *, memo: Memo | None = None) -> None:
        super().__init__()
        self.watch, self.memo, self.is_real = watch, memo, memo is None
        self.events: list[Event] = []
        self.order: list[str] = []  # modules in the order in which they were entered, stubs too
        self.recording = True
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._num_buffers = 0
        self._foreign: set[int] = set()
        self._aliases: dict[int, int] = {}  # buffers that are, in a real run, another one
        self._merged: set[int] = set()  # buffers that live on in the one that stands for a sum in place
        self._in_attention = False

    def own(self, tensors: Any) -> None:
        """Declares storages (parameters, buffers, the batch) that are there before and are no events."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, torch.Tensor):
                self._foreign.add(leaf.untyped_storage()._cdata)

    def mark(self, code: int, subject: Any) -> None:
        if self.recording:
            self.events.append(Event(code=code, subject=subject))

    def buffer_of(self, tensor: torch.Tensor) -> int:
        """The running number of a tensor's storage, -1 if it is not one of ours."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return self._aliases.get(entry[0], entry[0]) if entry is not None else -1

    def another_holder(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that gives, for tensors of one call, others that stand for the same buffers.

        Tensors that share a storage share the new one. Parameters, buffers of modules and the batch stay themselves.
        """
        storages: dict[int, torch.Tensor] = {}

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            key = tensor.untyped_storage()._cdata
            buffer = self.buffer_of(tensor)
            if buffer < 0 or not self.recording:
                return tensor
            recording, self.recording = self.recording, False
            if key not in storages:
                storages[key] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=tensor.device)
                if self.is_real:
                    storages[key].untyped_storage().copy_(tensor.untyped_storage())
                self._hold(storages[key], buffer)
            whole = storages[key].view(tensor.dtype)
            other = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
            values.copy(tensor, other)
            self.recording = recording
            return other

        return replace

    def _hold(self, tensor: torch.Tensor, buffer: int) -> None:
        storage = tensor.untyped_storage()
        key, number = storage._cdata, self._num_buffers
        self._num_buffers += 1
        self._aliases[number] = buffer
        self._live[key] = (number, weakref.ref(storage, lambda _: self._gone(key, number)))
        self.events.append(Event(code=HOLD, buffer=buffer))

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Within it a mask is added in place, as real tensors do it (transformers/attention.cpp, `_math`).

        Under a dispatch mode of the model's own (selective recomputation) they do not.
        """
        self._in_attention = _get_current_dispatch_mode_stack()[-1] is self
        try:
            yield
        finally:
            self._in_attention = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default or not self.recording:
            return function(*args, **kwargs)
        first = len(self.events)
        in_place = function is torch.ops.aten.add.Tensor and (self._in_attention or _accumulates_in_place(args[0]))
        with torch._C.DisableTorchFunction():  # `Numbers` is for the user's code
            result, key, workspace = self._run(function, args, kwargs)
            new = []
            for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    new += self._see(leaf)
            if is_measured(function, args):
                self.events.append(Event(code=WORKSPACE, subject=call_of(function, args, kwargs)))
            else:
                self.events += [Event(code=WORKSPACE, num_bytes=num_bytes) for num_bytes in workspace]
            if in_place and new:
                self._merge(args[0], new[0])
            if self.watch is not None:
                self.watch(first if len(self.events) > first else first - 1, function, args, kwargs, result, key)
        return result

    def _run(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Key | None, tuple[int, ...]]:
        """The result of an operation, what it depends on, and the bytes of its workspace."""
        if self.memo is None:
            result = function(*args, **kwargs)
            return result, None, workspace_bytes(function, args, result)
        key = key_of(function, args, kwargs)
        remembered = self.memo.find(key)
        if remembered is not None:
            result, workspace = make(remembered, args, kwargs), remembered.workspace_bytes
        else:
            try:
                result = run_on_meta(function, args, kwargs) if key is not None else NotImplemented
                if result is NotImplemented:
                    result = FAKE_KERNELS.get(function, function)(*args, **kwargs)
            except values.UNREADABLE as error:
                try:
                    result = values.read(function, args, kwargs)
                except KeyError:
                    raise error from None
                return result, None, workspace_bytes(function, args, result)
            workspace = workspace_bytes(function, args, result)
            if key is not None:
                self.memo.keep(key, function, args, kwargs, result, workspace)
        if not (isinstance(result, torch.Tensor) and result.dtype.is_floating_point):
            values.follow(function, args, kwargs, result)
        return result, key, workspace

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
        if number in self._merged:
            self._merged.discard(number)
        elif self.recording:
            self.events.append(Event(code=FREE, buffer=self._aliases.get(number, number)))

    def _merge(self, tensor: torch.Tensor, new: int) -> None:
        """The add was in place: its result lives in the old buffer, and nothing was allocated or freed."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is None or self.events[-1].code != ALLOC or self.events[-1].buffer != new:
            return
        self.events.pop()
        self._aliases[new] = self._aliases.get(entry[0], entry[0])
        self._merged.add(entry[0])


def _accumulates_in_place(tensor: Any) -> bool:
    """Whether autograd would add to this gradient in place: it holds the only reference to it and to its storage.

    See `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp. What this call and the dispatch before it hold
    themselves was counted in torch 2.13: four references to the tensor, two to its storage.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    if tensor._use_count() != 4:
        return False
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2)


class Numbers(TorchFunctionMode):
    """Makes the tensors visible that torch makes of Python numbers in products and quotients, which autograd saves."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            with self._recorder.attention():
                return function(*args, **(kwargs or {}))
        if function in _REVERSED and not isinstance(args[1], torch.Tensor):
            return self.__torch_function__(torch.mul, types, (args[0].reciprocal(), args[1]))
        if function in _SCALING and len(args) == 2 and self._recorder.recording:
            result = function(*args)
            if result.grad_fn is not None and type(args[1]) in (int, float):
                _save_number(result.grad_fn)
            return result
        return function(*args, **(kwargs or {}))


def _save_number(node: torch.autograd.graph.Node) -> None:
    """Has a node of autograd's graph hold a number as a tensor until it has run, as products and quotients do."""
    kept = node.metadata
    kept["osdp_number"] = torch.empty(NUMBER_BYTES, dtype=torch.uint8)

    def ran(*_: Any) -> None:
        kept.pop("osdp_number", None)

    node.register_hook(ran)


_SCALING_METHODS = ("mul", "mul_", "multiply", "multiply_", "div", "div_", "divide", "divide_", "true_divide")
_SCALING_METHODS += ("__mul__", "__rmul__", "__imul__", "__truediv__", "__itruediv__")
_SCALING = {getattr(torch.Tensor, name) for name in _SCALING_METHODS}
_SCALING |= {torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide}
_REVERSED = frozenset((torch.Tensor.__rtruediv__, torch.Tensor.__rdiv__))


_Replace = Callable[[torch.Tensor], torch.Tensor]


class _MarkPostBackward(torch.autograd.Function):
    """Sits where FSDP2 puts its RegisterPostBackwardFunction: on the inputs of a module, which it may replace."""

    @staticmethod
    def forward(ctx: Any, mark: Callable[[], None], replace: _Replace, *inputs: torch.Tensor) -> Any:
        ctx.mark = mark
        return tuple(replace(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.mark()
        return None, None, *gradients


class _Other(torch.autograd.Function):
    """Replaces what a block gives; a real run has nothing in its place."""

    @staticmethod
    def forward(ctx: Any, replace: _Replace, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(replace(tensor) for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients


def attach_hooks(
    recorder: Recorder, name: str, module: nn.Module, *, is_block: bool = False, dtype: torch.dtype | None = None
) -> list[Any]:
    """Marks a module's entries, exits and backward at the places where FSDP2's hooks would run.

    A block's inputs and outputs are replaced by tensors that stand for them; see the module's docstring. Inputs of
    floating-point numbers are cast to `dtype`, as FSDP2 casts them.
    """

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder.order.append(name)
        recorder.mark(ENTER, name)
        if dtype is not None:
            args, kwargs = tree_map(functools.partial(_cast, dtype), (args, kwargs))
        replace = recorder.another_holder() if is_block else _same
        if not torch.is_grad_enabled():
            return _replaced((args, kwargs), replace, lambda tracked: map(replace, tracked))
        mark = functools.partial(recorder.mark, POST_BACKWARD, name)
        return _replaced((args, kwargs), replace, lambda tracked: _MarkPostBackward.apply(mark, replace, *tracked))

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        recorder.mark(EXIT, name)
        with_gradients = torch.is_grad_enabled()
        for leaf in tree_leaves(output):
            if with_gradients and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: recorder.mark(PRE_BACKWARD, name))
        if not is_block:
            return None
        replace = recorder.another_holder()
        other = functools.partial(_Other.apply, replace) if with_gradients else lambda *tracked: map(replace, tracked)
        return _replaced(output, replace, lambda tracked: other(*tracked))

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _replaced(tree: Any, replace: _Replace, replace_tracked: Callable[[list[torch.Tensor]], Any]) -> Any:
    """A tree with every tensor replaced, those that require a gradient all at once."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    tracked = [leaf for leaf in tensors if leaf.requires_grad]
    marked = iter(replace_tracked(tracked) if tracked else ())

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return next(marked) if leaf.requires_grad else replace(leaf)

    return tree_map(other, tree)


def attach_gradient_hook(recorder: Recorder, parameter: nn.Parameter, name: str) -> Any:
    """Marks which buffer holds a parameter's gradient once autograd has accumulated it."""

    def accumulated(holder: torch.Tensor) -> None:
        if holder.grad is not None:
            recorder.events.append(Event(code=GRADIENT, buffer=recorder.buffer_of(holder.grad), subject=name))

    return parameter.register_post_accumulate_grad_hook(accumulated)
