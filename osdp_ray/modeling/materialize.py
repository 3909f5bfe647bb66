"""Models are built on the meta device and filled parameter by parameter, so that no rank ever holds a whole model.

While the constructor runs on meta, every in-place operation on a parameter or buffer (`normal_`, `zero_`, ...) is
recorded. `materialize` replays a tensor's record on a full-size scratch tensor with a generator seeded by the seed and
the tensor's name, and keeps this rank's shard: the values depend neither on the plan nor on the number of ranks.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from osdp_ray.errors import TraceError
from osdp_ray.workload import Workload

_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Records the in-place operations on meta tensors by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, list[_Step]] = {}
        self.keep: list[torch.Tensor] = []  # storages must not be reused while their record is open

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        skip = _is_random(function) and args[0].is_meta  # meta kernels of random operations are slow, and do nothing
        result = args[0] if skip else function(*args, **kwargs)
        written = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if written is not None and written.is_meta and function._schema.is_mutable:
            self.keep.append(written)
            self.steps.setdefault(_key(written), []).append((function, args, kwargs))
        return result


class _NoRandom(TorchDispatchMode):
    """Leaves out the random in-place operations on meta tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if _is_random(function) and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


def _is_random(function: Any) -> bool:
    return function in _RANDOM


_RANDOM = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("normal_", "uniform_", "exponential_", "bernoulli_", "random_", "log_normal_", "cauchy_")
    if hasattr(getattr(torch.ops.aten, name), "default")
)


def build_bare(workload: Workload) -> nn.Module:
    """The workload's model on the meta device, without any record of its initialisation."""
    with torch.device("meta"), _NoRandom():
        return workload.build_model()


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initialisation:
    """The recorded initialisation of every parameter and buffer, by name; see the module's docstring."""

    steps: dict[str, list[_Step]]
    values: dict[str, torch.Tensor]
    metas: dict[str, torch.Tensor]

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
                whole = self._whole(name, device, seed)
                if isinstance(tensor, DTensor):
                    sharded = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
                    tensor.to_local().copy_(sharded.to_local())
                else:
                    tensor.copy_(whole)

    def _whole(self, name: str, device: torch.device | str, seed: int) -> torch.Tensor:
        if name in self.values:
            return self.values[name].to(device)
        meta = self.metas[name]
        whole = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            for function, args, kwargs in self.steps[name]:
                function(*_on(args, whole, meta), **_on(kwargs, whole, meta))
        return whole


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


def _on(arguments: Any, whole: torch.Tensor, meta: torch.Tensor) -> Any:
    """Recorded arguments with the meta tensor's views replaced by the same views of `whole`."""

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            if _key(value) != _key(meta):
                raise TraceError(
                    "",
                    "its initialisation copies one tensor into another on the meta device",
                    "Initialise with in-place operations (torch.nn.init), or tie the parameters.",
                )
            return whole.as_strided(value.shape, value.stride(), value.storage_offset())
        return value

    return torch.utils._pytree.tree_map(replace, arguments)


def build_on_meta(workload: Workload) -> tuple[nn.Module, Initialisation]:
    """The workload's model on the meta device, with the record of how it initialises itself.

    Raises TraceError where a parameter is never initialised, so that no run starts from uninitialised memory.
    """
    recorder = _Recorder()
    with torch.device("meta"), recorder:
        model = workload.build_model()
    steps: dict[str, list[_Step]] = {}
    values: dict[str, torch.Tensor] = {}
    metas: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_meta:
            values[name] = tensor.detach()
            continue
        recorded = recorder.steps.get(_key(tensor))
        if not recorded:
            raise TraceError(
                name,
                "it is never initialised by in-place operations, so its values would be whatever memory holds",
                "Initialise it in the constructor with torch.nn.init, or build buffers on the CPU.",
            )
        steps[name], metas[name] = recorded, tensor.detach()
    return model, Initialisation(steps=steps, values=values, metas=metas)
