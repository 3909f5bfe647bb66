"""What operations on fake tensors gave, so that the same operation on tensors alike runs no fake kernel again.

A model of equal blocks does the same few dozen operations over and over. torch's fake mode has a cache of its own,
whose keys and results take longer to make than many a kernel; here an operation's key is what its result depends on:
the operation, its numbers, and of every tensor type, shape, strides, offset, the size of its storage and which others
share that. A result is remembered where it is made of new tensors, of views of the first argument, or of arguments.

What a result looks like is found by torch's fake mode; of the commonest operations by their kernels for the meta device
themselves, which the fake mode would ask in the end, too.

How a fake tensor is put together is private to torch; this is 2.13's way (torch/_subclasses/fake_tensor.py).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Key = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_OWN_STATE = ("_osdp_value", "_is_param")  # attributes that belong to one tensor alone


class _NotAlike(Exception):
    """Something that a key cannot describe."""


@dataclasses.dataclass(frozen=True)
class _Output:
    """One tensor of a result: an argument itself, a view of one, or (without a `source`) a new one."""

    source: int | None
    is_argument: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Remembered:
    """A result: `outputs` are tensors or plain values, `kind` the type that holds several, None where there is one.

    `workspace_bytes` are what the operation holds while it runs; see workspaces.
    """

    outputs: tuple[Any, ...]
    kind: type | None
    workspace_bytes: tuple[int, ...]


class Memo:
    """Remembers results. Everything in it belongs to one fake mode."""

    def __init__(self) -> None:
        self._found: dict[Key, Remembered | None] = {}

    def find(self, key: Key | None) -> Remembered | None:
        return self._found.get(key) if key is not None else None

    def keep(
        self,
        key: Key,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        workspace_bytes: tuple[int, ...],
    ) -> None:
        """Remembers a result, unless it is of a kind that cannot be made again, or arguments were given new shapes."""
        if key in self._found:
            return
        kind = type(result) if type(result) in (tuple, list) else None
        tensors = _tensors_of(args, kwargs)
        try:
            outputs = _described_outputs(function, tensors, list(result) if kind else [result])
        except _NotAlike:
            outputs = None
        if outputs is None or key_of(function, args, kwargs) != key:
            self._found[key] = None
            return
        self._found[key] = Remembered(tuple(outputs), kind, workspace_bytes)


def key_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """What the result of an operation on fake tensors depends on; None where that cannot be told."""
    storages: dict[int, int] = {}
    try:
        with torch._C.DisableTorchFunction():
            described = [_described(value, storages) for value in args]
            for name, value in kwargs.items():
                described += (name, _described(value, storages))
    except _NotAlike:
        return None
    return (function, *described)


def _described(value: Any, storages: dict[int, int]) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.dtype.is_complex or value.layout is not torch.strided:
            raise _NotAlike
        storage = value.untyped_storage()
        place = storages.setdefault(storage._cdata, len(storages))
        shape, stride = value.shape, value.stride()
        return (
            value.dtype,
            shape,
            stride,
            value.storage_offset(),
            value.requires_grad,
            value.is_neg(),
            storage.nbytes(),
            place,
            value.fake_device,
        )
    if kind in (list, tuple) or kind is torch.Size:
        return (kind, *(_described(item, storages) for item in value))
    if kind in _PLAIN:
        return (kind, value)
    raise _NotAlike


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors in the order in which a key names them. No closure: a cycle would keep them alive."""
    found: list[torch.Tensor] = []
    _collect((*args, *kwargs.values()), found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _described_outputs(function: Any, tensors: list[torch.Tensor], results: list[Any]) -> list[Any]:
    """What `make` needs of every output. Raises _NotAlike."""
    with torch._C.DisableTorchFunction():
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        outputs: list[Any] = []
        for result in results:
            if isinstance(result, torch.Tensor):
                outputs.append(_described_output(function, tensors, known, result))
                known.add(result.untyped_storage()._cdata)
            elif type(result) in _PLAIN:
                outputs.append(result)
            else:
                raise _NotAlike
        return outputs


def _described_output(function: Any, tensors: list[torch.Tensor], known: set[int], result: Any) -> _Output:
    if type(result) is not FakeTensor or result.constant is not None or result.dtype.is_complex:
        raise _NotAlike
    if result.layout is not torch.strided or result.is_neg():
        raise _NotAlike
    same = next((number for number, tensor in enumerate(tensors) if tensor is result), None)
    source = same
    if same is None:
        if result.requires_grad:
            raise _NotAlike
        storage = result.untyped_storage()
        if storage._cdata in known:
            if not function.is_view or not tensors or tensors[0].untyped_storage()._cdata != storage._cdata:
                raise _NotAlike
            source = 0
        elif result.storage_offset() or storage.nbytes() != _least_bytes(result):
            raise _NotAlike
    return _Output(
        source=source,
        is_argument=same is not None,
        dtype=result.dtype,
        shape=tuple(result.shape),
        stride=result.stride(),
        offset=int(result.storage_offset()),
        state={name: value for name, value in result.__dict__.items() if name not in _OWN_STATE},
    )


def _least_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a storage that holds a tensor and nothing else."""
    if not tensor.numel():
        return 0
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def make(remembered: Remembered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result once more, for arguments of the same key."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        made = [_made(output, args, kwargs) if type(output) is _Output else output for output in remembered.outputs]
    return made[0] if remembered.kind is None else made if remembered.kind is list else tuple(made)


def _made(output: _Output, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if output.source is None:
        inner = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        return _fake(inner, output.state)
    first = args[0] if output.source == 0 and args and isinstance(args[0], torch.Tensor) else None
    tensor = first if first is not None else _tensors_of(args, kwargs)[output.source]
    if output.is_argument:
        return tensor
    return _fake(_on_storage_of(tensor, output.dtype, output.offset, output.shape, output.stride), output.state)


def _on_storage_of(tensor: torch.Tensor, dtype: Any, offset: Any, shape: Any, stride: Any) -> torch.Tensor:
    """A meta tensor on the storage of another."""
    made: torch.Tensor = torch.empty(0, dtype=dtype, device="meta")
    return made.set_(tensor.untyped_storage(), offset, shape, stride)


def _fake(inner: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    fake = torch.Tensor._make_subclass(
        FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=state["_fake_device"]
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(state)
    return fake


# -- kernels of the meta device


def run_on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation by its kernel for the meta device; NotImplemented where that may differ from a CPU's.

    Views, matrix products, and elementwise operations on contiguous tensors of one floating-point type. All tensors are
    fake ones that a key can describe.
    """
    if function not in _ANY_LAYOUT and function not in _CONTIGUOUS:
        return NotImplemented
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        tensors = [value for value in args if type(value) is FakeTensor]
        if not tensors or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            return NotImplemented
        if function in _CONTIGUOUS and not _is_plain(tensors):
            return NotImplemented
        twins = [
            _on_storage_of(value, value.dtype, value.storage_offset(), value.shape, value.stride())
            if type(value) is FakeTensor
            else value
            for value in args
        ]
        result = function(*twins, **kwargs)
        state = {name: value for name, value in tensors[0].__dict__.items() if name not in _OWN_STATE}
        if isinstance(result, torch.Tensor):
            return _fake(result, state)
        return [_fake(item, state) for item in result]


def _is_plain(tensors: list[FakeTensor]) -> bool:
    first = tensors[0]
    return first.is_floating_point() and all(t.is_contiguous() and t.dtype == first.dtype for t in tensors)


_aten = torch.ops.aten
_ANY_LAYOUT = frozenset(
    (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.detach.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.split.Tensor,
        _aten.unsqueeze.default,
        _aten.permute.default,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
    )
)
_CONTIGUOUS = frozenset(
    (
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.mul.Tensor,
        _aten.div.Tensor,
        _aten.neg.default,
        _aten.gelu.default,
        _aten.gelu_backward.default,
        _aten.silu.default,
        _aten.relu.default,
        _aten.rsqrt.default,
        _aten.threshold_backward.default,
        _aten.sum.dim_IntList,
    )
)
