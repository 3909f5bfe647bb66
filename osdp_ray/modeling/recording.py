"""What a constructor on the meta device does to its tensors, operation by operation.

In goes a workload; out come its model on the meta device and a Recorder of every operation that created or wrote one
of its tensors, in order. `materialize` replays them.
"""

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from osdp_ray.modeling import user_code
from osdp_ray.workload import Workload


@dataclasses.dataclass(frozen=True)
class Operation:
    """A recorded call. `created` are the meta tensors whose storages it made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    created: tuple[torch.Tensor, ...]


class Recorder(TorchDispatchMode):
    """Records the operations that create or write meta tensors, in order, and by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.by_storage: dict[int, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        skip = is_random(function) and args[0].is_meta  # meta kernels of random operations are slow, and do nothing
        result = args[0] if skip else function(*args, **kwargs)
        written = {key_of(args[0])} if function._schema.is_mutable and args and is_meta(args[0]) else set()
        given = {key_of(tensor) for tensor in meta_tensors((args, kwargs))}
        created = tuple(
            tensor
            for tensor in meta_tensors(result)
            if key_of(tensor) not in self.by_storage and key_of(tensor) not in given
        )
        if written or created:
            self.record(function, args, kwargs, created, written)
        return result

    def record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        created: tuple[torch.Tensor, ...],
        written: Collection[int] = (),
    ) -> None:
        """Keeps an operation, and with it its storages: so no storage's address is used twice.

        Aliases are kept, since `parameter.data = other` would put another storage into the tensors themselves.
        """
        args, kwargs, created = (map_tensors(torch.Tensor.detach, value) for value in (args, kwargs, created))
        self.operations.append(Operation(function, args, kwargs, created))
        for key in {*written, *(key_of(tensor) for tensor in created)}:
            self.by_storage.setdefault(key, []).append(len(self.operations) - 1)


class Constants(TorchFunctionMode):
    """Records `torch.tensor(...)`, which no dispatch mode sees, with the values that a meta tensor drops."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor) and is_meta(result) and not isinstance(args[0], torch.Tensor):
            value = function(*args, **{**(kwargs or {}), "device": "cpu"})
            self._recorder.record(_copy_to, (value, torch.device("meta")), {}, (result,))
        return result


def _copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, copy=True)


class NoRandom(TorchDispatchMode):
    """Leaves out the random in-place operations on meta tensors, and notes whether all that a constructor does to its
    tensors is to make them and to fill or draw the whole of each: then nothing is held beside them while it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.is_simple = True

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_random(function) and args[0].is_meta:
            self.is_simple = self.is_simple and _is_whole(args[0])
            return args[0]
        if function not in _HARMLESS:
            self.is_simple = False
        return function(*args, **(kwargs or {}))


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def is_random(function: Any) -> bool:
    return function in _RANDOM


TRANSFORMERS = "transformers.modeling_utils"
_RANDOM = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("normal_", "uniform_", "exponential_", "bernoulli_", "random_", "log_normal_", "cauchy_")
    if hasattr(getattr(torch.ops.aten, name), "default")
)
UNINITIALISED = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("empty", "memory_format"),
        ("empty_strided", "default"),
        ("empty_like", "default"),
        ("new_empty", "default"),
        ("new_empty_strided", "default"),
    )
)


def is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def meta_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The meta tensors in arguments: they come alone, or in lists, tuples and dicts. torch's pytrees take ten times
    as long."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            if not isinstance(item, int | float):
                yield from meta_tensors(item)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Arguments with something else in the place of their meta tensors."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.is_meta else value
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, item) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # torch 2.13: the address of the storage, which identifies it


def record_build(workload: Workload) -> tuple[Recorder, nn.Module]:
    recorder = Recorder()
    with torch.device("meta"), recorder, Constants(recorder), _initialising(), uncollected():
        return recorder, user_code.build_model(workload)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within it no cycles are looked for: a thousand layers have none, and looking took a fourth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _initialising() -> Iterator[None]:
    """Lets models of transformers initialise themselves, which they leave out where they find the meta device."""
    module = sys.modules.get(TRANSFORMERS)
    saved = getattr(module, "get_torch_context_manager_or_global_device", None)
    if saved is None:
        yield
        return
    module.get_torch_context_manager_or_global_device = lambda: None  # type: ignore[union-attr]
    try:
        yield
    finally:
        module.get_torch_context_manager_or_global_device = saved  # type: ignore[union-attr]


_HARMLESS = UNINITIALISED | {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.select.int,
}
