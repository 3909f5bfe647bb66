"""Models are built on the meta device and filled tensor by tensor, so that no rank ever holds a whole model.

While the constructor runs on meta, every operation that creates or writes a tensor is recorded. To fill a parameter or
buffer, the operations that lead to it, and no others, are replayed on full-size scratch tensors, each with a generator
seeded by the seed and the operation's place in the constructor, and this rank's shard is kept: the values depend
neither on the plan nor on the number of ranks, and a tensor that was copied from another is equal to it.
"""

import contextlib
import dataclasses
import gc
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from osdp_ray.errors import TraceError
from osdp_ray.modeling import user_code
from osdp_ray.workload import Workload


@dataclasses.dataclass(frozen=True)
class _Operation:
    """A recorded call. `created` are the meta tensors whose storages it made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    created: tuple[torch.Tensor, ...]


class _Recorder(TorchDispatchMode):
    """Records the operations that create or write meta tensors, in order, and by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.by_storage: dict[int, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        skip = _is_random(function) and args[0].is_meta  # meta kernels of random operations are slow, and do nothing
        result = args[0] if skip else function(*args, **kwargs)
        written = {_key(args[0])} if function._schema.is_mutable and args and _is_meta(args[0]) else set()
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)}
        created = tuple(
            leaf
            for leaf in tree_leaves(result)
            if _is_meta(leaf) and _key(leaf) not in self.by_storage and _key(leaf) not in given
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
        args, kwargs, created = tree_map(_alias, (args, kwargs, created))
        self.operations.append(_Operation(function, args, kwargs, created))
        for key in {*written, *(_key(tensor) for tensor in created)}:
            self.by_storage.setdefault(key, []).append(len(self.operations) - 1)


class _Constants(TorchFunctionMode):
    """Records `torch.tensor(...)`, which no dispatch mode sees, with the values that a meta tensor drops."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor) and _is_meta(result) and not isinstance(args[0], torch.Tensor):
            value = function(*args, **{**(kwargs or {}), "device": "cpu"})
            self._recorder.record(_copy_to, (value, torch.device("meta")), {}, (result,))
        return result


def _copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, copy=True)


class _NoRandom(TorchDispatchMode):
    """Leaves out the random in-place operations on meta tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if _is_random(function) and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


def _is_random(function: Any) -> bool:
    return function in _RANDOM


_TRANSFORMERS = "transformers.modeling_utils"
_REMEDY = "Initialise it there, with torch.nn.init or from torch.zeros and the like"
_RANDOM = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("normal_", "uniform_", "exponential_", "bernoulli_", "random_", "log_normal_", "cauchy_")
    if hasattr(getattr(torch.ops.aten, name), "default")
)
_UNINITIALISED = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("empty", "memory_format"),
        ("empty_strided", "default"),
        ("empty_like", "default"),
        ("new_empty", "default"),
        ("new_empty_strided", "default"),
    )
)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _alias(value: Any) -> Any:
    return value.detach() if _is_meta(value) else value


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # torch 2.13: the address of the storage, which identifies it


def build_bare(workload: Workload) -> nn.Module:
    """The workload's model on the meta device, without any record of its initialisation."""
    with torch.device("meta"), _NoRandom(), _uncollected():
        return user_code.build_model(workload)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Within it no cycles are looked for: a thousand layers have none, and looking took a fourth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def build_on_meta(workload: Workload) -> tuple[nn.Module, "Initialisation"]:
    """The workload's model on the meta device, with the record of how it initialises itself.

    Raises TraceError where a parameter is never initialised, so that no run starts from whatever memory holds.
    """
    had_transformers = _TRANSFORMERS in sys.modules
    recorder, model = _record_build(workload)
    if not had_transformers and _TRANSFORMERS in sys.modules:
        recorder, model = _record_build(workload)
    initialisation = Initialisation(recorder, model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not initialisation.is_known(name):
            raise TraceError(
                name,
                "its constructor never initialises it, so its values would be whatever memory holds",
                _REMEDY,
            )
    return model, initialisation


def _record_build(workload: Workload) -> tuple[_Recorder, nn.Module]:
    recorder = _Recorder()
    with torch.device("meta"), recorder, _Constants(recorder), _initialising():
        return recorder, user_code.build_model(workload)


@contextlib.contextmanager
def _initialising() -> Iterator[None]:
    """Lets models of transformers initialise themselves, which they leave out where they find the meta device."""
    module = sys.modules.get(_TRANSFORMERS)
    saved = getattr(module, "get_torch_context_manager_or_global_device", None)
    if saved is None:
        yield
        return
    module.get_torch_context_manager_or_global_device = lambda: None  # type: ignore[union-attr]
    try:
        yield
    finally:
        module.get_torch_context_manager_or_global_device = saved  # type: ignore[union-attr]


class Initialisation:
    """The recorded initialisation of every parameter and buffer, by name; see the module's docstring."""

    def __init__(self, recorder: _Recorder, model: nn.Module) -> None:
        self._recorder = recorder
        self._tensors = {
            name: tensor.detach()
            for name, tensor in [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        }

    def is_known(self, name: str) -> bool:
        """Whether some operation has given the tensor its values."""
        indices = self._recorder.by_storage.get(_key(self._tensors[name]), ())
        return any(self._recorder.operations[index].function not in _UNINITIALISED for index in indices)

    def materialize(
        self, model: nn.Module, device: torch.device | str, seed: int, *, skip: Collection[str] = ()
    ) -> None:
        """Allocates and fills the model's parameters (sharded or not) and buffers on `device`.

        Modules named in `skip`, and what lies in them, stay on the meta device.
        """
        outside = tuple(f"{name}." for name in skip)
        allocated: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name not in skip and not name.startswith(outside):
                _allocate(module, device, allocated)
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_meta or id(tensor) in done:
                    continue
                done.add(id(tensor))
                whole = self.whole(name, device, seed)
                if isinstance(tensor, DTensor):
                    sharded = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
                    tensor.to_local().copy_(sharded.to_local())
                else:
                    tensor.copy_(whole)

    def whole(self, name: str, device: torch.device | str, seed: int) -> torch.Tensor:
        """The full initial value of a parameter or buffer on `device`."""
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return tensor.to(device)
        bases: dict[int, torch.Tensor] = {}

        def real(value: Any) -> Any:
            if _is_meta(value):
                if _key(value) not in bases:
                    raise TraceError(name, "its values come from a tensor whose making is not known", _REMEDY)
                return bases[_key(value)].as_strided(value.shape, value.stride(), value.storage_offset())
            if isinstance(value, torch.device):
                return torch.device(device)
            return value

        needed: set[int] = set()
        self._collect(_key(tensor), len(self._recorder.operations), needed)
        with torch.random.fork_rng(devices=[]):
            for index in sorted(needed):
                operation = self._recorder.operations[index]
                digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:7], "little"))
                result = operation.function(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
                outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                if operation.created:
                    bases |= {_key(meta): output for meta, output in zip(operation.created, outputs, strict=False)}
            return real(tensor)

    def _collect(self, key: int, before: int, needed: set[int]) -> None:
        """Adds the operations before `before` that the values of a storage come from."""
        for index in self._recorder.by_storage.get(key, ()):
            if index >= before or index in needed:
                continue
            needed.add(index)
            operation = self._recorder.operations[index]
            for leaf in tree_leaves((operation.args, operation.kwargs)):
                if _is_meta(leaf):
                    self._collect(_key(leaf), index, needed)


def _allocate(module: nn.Module, device: torch.device | str, allocated: dict[int, torch.Tensor]) -> None:
    """Puts uninitialised tensors in the place of a module's own meta ones; tied ones stay tied, unlike `to_empty`."""
    for tensors in (module._parameters, module._buffers):
        for key, tensor in tensors.items():
            if tensor is None or tensor.device.type != "meta":
                continue
            if id(tensor) not in allocated:
                empty = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                allocated[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            tensors[key] = allocated[id(tensor)]
