"""Models are built on the meta device and filled part by part, so that no rank ever holds a whole model.

What the constructor did to a parameter or buffer (`recording`) is replayed, each random operation with a generator
seeded by the seed and the operation's place in the constructor. The values depend neither on the plan nor on the number
of ranks, and a tensor that was copied from another is equal to it.

Nearly every initialisation treats all elements alike: a creation, then fills and random numbers in place. Those are
drawn chunk by chunk of whole rows (`costs.chunk_rows` tells how many), each chunk with a seed of its own: a rank draws
the chunks that its shard meets, in place where it holds all of a chunk, and nothing else. What else a constructor does
is replayed on the whole tensor, of which the shard is kept, and whatever is not needed any more is freed at once.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from osdp_ray.costs import chunk_rows
from osdp_ray.errors import TraceError
from osdp_ray.modeling import user_code
from osdp_ray.modeling.recording import (
    TRANSFORMERS,
    UNINITIALISED,
    NoRandom,
    Operation,
    Recorder,
    is_random,
    key_of,
    map_tensors,
    meta_tensors,
    record_build,
    uncollected,
)
from osdp_ray.modeling.splitting import slices_of
from osdp_ray.workload import Workload

_REMEDY = "Initialise it there, with torch.nn.init or from torch.zeros and the like"


def build_bare(workload: Workload) -> nn.Module:
    """The workload's model on the meta device, without any record of its initialisation."""
    with torch.device("meta"), NoRandom(), uncollected():
        return user_code.build_model(workload)


def build_with_scratch(workload: Workload) -> tuple[nn.Module, dict[str, int]]:
    """The workload's model on the meta device, and what is held beside each parameter and buffer while it is given its
    first values, by name; {} where that is nothing."""
    building = NoRandom()
    with torch.device("meta"), building, uncollected():
        model = user_code.build_model(workload)
    if building.is_simple and all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model, {}
    model, initialisation = build_recorded(workload)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return model, {name: initialisation.scratch_bytes(name) for name in names}


def build_on_meta(workload: Workload) -> tuple[nn.Module, "Initialisation"]:
    """The workload's model on the meta device, with the record of how it initialises itself.

    Raises TraceError where a parameter is never initialised, so that no run starts from whatever memory holds.
    """
    model, initialisation = build_recorded(workload)
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not initialisation.is_known(name):
            raise TraceError(
                name,
                "its constructor never initialises it, so its values would be whatever memory holds",
                _REMEDY,
            )
    return model, initialisation


def build_recorded(workload: Workload) -> tuple[nn.Module, "Initialisation"]:
    """The same, whether all is initialised or not."""
    had_transformers = TRANSFORMERS in sys.modules
    recorder, model = record_build(workload)
    if not had_transformers and TRANSFORMERS in sys.modules:
        recorder, model = record_build(workload)
    return model, Initialisation(recorder, model)


@dataclasses.dataclass(frozen=True)
class _Alike:
    """An initialisation that treats all elements alike: `steps` in place, each with its operation's number.

    `first` and `last` bound the elements that a step fills, None where it is all of them.
    """

    steps: tuple[tuple[int, Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[int, int] | None], ...]


class Initialisation:
    """The recorded initialisation of every parameter and buffer, by name; see the module's docstring."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
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
        indices = self._recorder.by_storage.get(key_of(self._tensors[name]), ())
        return any(self._recorder.operations[index].function not in UNINITIALISED for index in indices)

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
        slices = slices_of(model)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_meta:
                    continue
                place = slices.get(name)
                whole_name = place.name if place else name
                local, starts = _local_part(tensor)
                if place:
                    starts = tuple(start + (place.start if dim == place.dim else 0) for dim, start in enumerate(starts))
                self._fill(whole_name, local, starts, seed)

    def fill(self, name: str, target: torch.Tensor, starts: Sequence[int], seed: int) -> None:
        """Gives a plain tensor the values of the part of a parameter or buffer that begins at `starts`."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self._fill(name, target, starts, seed)

    def whole(self, name: str, device: torch.device | str, seed: int) -> torch.Tensor:
        """The full initial value of a parameter or buffer on `device`."""
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return tensor.to(device)
        target = torch.empty_like(tensor, device=device)
        self.fill(name, target, (0,) * tensor.dim(), seed)
        return target

    def scratch_bytes(self, name: str) -> int:
        """The most that is held beside a tensor while its values are drawn: 0 where that goes chunk by chunk."""
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return tensor.nbytes
        if self._alike(tensor) is not None:
            return 0
        sizes: dict[int, int] = {}
        highest = 0
        for _, operation, freed in self._schedule(tensor):
            sizes |= {key_of(meta): meta.untyped_storage().nbytes() for meta in operation.created}
            highest = max(highest, sum(sizes.values()))
            for key in freed:
                sizes.pop(key, None)
        return highest

    def _fill(self, name: str, target: torch.Tensor, starts: Sequence[int], seed: int) -> None:
        tensor = self._tensors[name]
        if target.numel() == 0:
            return
        if not tensor.is_meta:
            target.copy_(_part(tensor, starts, target.shape))
        elif (alike := self._alike(tensor)) is not None:
            _draw_chunks(alike, tensor.shape, target, starts, seed)
        else:
            target.copy_(_part(self._replay(name, target.device, seed), starts, target.shape))

    def _alike(self, tensor: torch.Tensor) -> _Alike | None:
        """The initialisation of a tensor as steps that treat all elements alike, None where they are not such."""
        if not tensor.dim() or not tensor.is_contiguous() or tensor.nbytes != tensor.untyped_storage().nbytes():
            return None
        steps = []
        for index in self._recorder.by_storage.get(key_of(tensor), ()):
            operation = self._recorder.operations[index]
            step = _in_place(operation, tensor)
            if step is None:
                return None
            function, args, kwargs, bounds = step
            if bounds is None and (function is None or function in _FILLS or is_random(function)):
                steps.clear()
            if function is not None:
                steps.append((index, function, args, kwargs, bounds))
        return _Alike(tuple(steps)) if steps else None

    def _replay(self, name: str, device: torch.device, seed: int) -> torch.Tensor:
        """The whole tensor, by all operations that its values come from."""
        tensor = self._tensors[name]
        bases: dict[int, torch.Tensor] = {}

        def real(value: torch.Tensor) -> torch.Tensor:
            if key_of(value) not in bases:
                raise TraceError(name, "its values come from a tensor whose making is not known", _REMEDY)
            return bases[key_of(value)].as_strided(value.shape, value.stride(), value.storage_offset())

        for index, operation, freed in self._schedule(tensor):
            args, kwargs = (_on(device, map_tensors(real, value)) for value in (operation.args, operation.kwargs))
            outputs = _run(index, operation.function, args, kwargs, seed)
            if operation.created:
                bases |= {key_of(meta): output for meta, output in zip(operation.created, outputs, strict=False)}
            del args, kwargs, outputs
            for key in freed:
                bases.pop(key, None)
        return real(tensor)

    def _schedule(self, tensor: torch.Tensor) -> Iterable[tuple[int, Operation, set[int]]]:
        """The operations that a tensor's values come from, in order: number, operation, and the storages that none
        after it needs."""
        needed: set[int] = set()
        self._collect(key_of(tensor), len(self._recorder.operations), needed)
        seen = {key_of(tensor)}
        found: list[tuple[int, Operation, set[int]]] = []
        for index in sorted(needed, reverse=True):
            operation = self._recorder.operations[index]
            touched = set(map(key_of, meta_tensors((operation.args, operation.kwargs, operation.created))))
            found.append((index, operation, touched - seen))
            seen |= touched
        return reversed(found)

    def _collect(self, key: int, before: int, needed: set[int]) -> None:
        """Adds the operations before `before` that the values of a storage come from."""
        for index in self._recorder.by_storage.get(key, ()):
            if index >= before or index in needed:
                continue
            needed.add(index)
            operation = self._recorder.operations[index]
            for other in meta_tensors((operation.args, operation.kwargs)):
                self._collect(key_of(other), index, needed)


def _overloads(*names: str) -> frozenset[Any]:
    """Those of these operations that torch has, such as 'mul_.Tensor'."""
    packets = [(getattr(torch.ops.aten, name), overload) for name, _, overload in (n.partition(".") for n in names)]
    return frozenset(getattr(packet, overload) for packet, overload in packets if hasattr(packet, overload))


_FILLS = _overloads("fill_.Scalar", "fill_.Tensor", "zero_.default")
_ELEMENTWISE = _FILLS | _overloads(
    *(f"{name}.{overload}" for name in ("mul_", "add_", "sub_", "div_", "pow_") for overload in ("Scalar", "Tensor")),
    *(f"{name}.default" for name in ("clamp_", "clamp_min_", "clamp_max_", "erfinv_", "abs_", "neg_", "exp_", "sqrt_")),
)
_CREATIONS: dict[Any, Callable[[tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]] = {
    torch.ops.aten.zeros.default: lambda _: (torch.ops.aten.zero_.default, ()),
    torch.ops.aten.ones.default: lambda _: (torch.ops.aten.fill_.Scalar, (1,)),
    torch.ops.aten.full.default: lambda args: (torch.ops.aten.fill_.Scalar, args[1:2]),
    torch.ops.aten.randn.default: lambda _: (torch.ops.aten.normal_.default, ()),
    torch.ops.aten.rand.default: lambda _: (torch.ops.aten.uniform_.default, ()),
}


def _in_place(operation: Operation, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any] | None:
    """An operation on a tensor's storage as one in place that treats all elements alike, with its bounds; the function
    is None where it only allocates. None where it is not such an operation."""
    function, args = operation.function, operation.args
    if any(key_of(created) == key_of(tensor) for created in operation.created):
        if function in UNINITIALISED:
            return None, (), {}, None
        if function not in _CREATIONS or operation.created[0].shape != tensor.shape:
            return None
        return *_CREATIONS[function](args), {}, None
    if function not in _ELEMENTWISE and not is_random(function):
        return None
    target, rest = args[0], args[1:]
    if any(isinstance(leaf, torch.Tensor) and (leaf.dim() or leaf.is_meta) for leaf in tree_leaves(rest)):
        return None
    if key_of(target) != key_of(tensor) or not target.is_contiguous():
        return None
    if target.shape == tensor.shape:
        return function, rest, operation.kwargs, None
    if function not in _FILLS:
        return None
    return function, rest, operation.kwargs, (target.storage_offset(), target.storage_offset() + target.numel())


def _draw_chunks(alike: _Alike, shape: torch.Size, target: torch.Tensor, starts: Sequence[int], seed: int) -> None:
    """Fills a part of a tensor of this shape: chunks of which it holds all in place, others beside it."""
    num_rows = chunk_rows(tuple(shape))
    first, last = starts[0], starts[0] + target.shape[0]
    is_whole_rows = target.shape[1:] == shape[1:] and target.is_contiguous()
    for number in range(first // num_rows, -(-last // num_rows)):
        begin, end = number * num_rows, min((number + 1) * num_rows, shape[0])
        low, high = max(begin, first), min(end, last)
        mine = target[low - first : high - first]
        if is_whole_rows and (low, high) == (begin, end):
            _draw(alike, mine, begin, number, seed)
        else:
            chunk = target.new_empty((end - begin, *shape[1:]))
            _draw(alike, chunk, begin, number, seed)
            mine.copy_(_part(chunk, (low - begin, *starts[1:]), mine.shape))
            del chunk


def _draw(alike: _Alike, chunk: torch.Tensor, begin: int, number: int, seed: int) -> None:
    """Gives a chunk its values: whole rows from row `begin` on."""
    offset = begin * (chunk.numel() // chunk.shape[0])
    for index, function, args, kwargs, bounds in alike.steps:
        target = chunk
        if bounds is not None:
            low, high = (min(max(bound - offset, 0), chunk.numel()) for bound in bounds)
            if low == high:
                continue
            target = chunk.view(-1)[low:high]
        if is_random(function):
            _seed(seed, index, number)
        function(target, *args, **kwargs)


def _run(index: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """One operation on whole tensors, the random ones chunk by chunk as elsewhere; the tensors that it gives."""
    if is_random(function) and args[0].dim() and args[0].is_contiguous():
        target, rest = args[0], args[1:]
    else:
        _seed(seed, index)
        result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if function not in _CREATIONS or not is_random(_CREATIONS[function](args)[0]) or not outputs[0].dim():
            return outputs
        target = outputs[0]
        (function, rest), kwargs = _CREATIONS[function](args), {}
    for number, chunk in enumerate(target.split(chunk_rows(tuple(target.shape)))):
        _seed(seed, index, number)
        function(chunk, *rest, **kwargs)
    return [target]


def _seed(seed: int, index: int, chunk: int = 0) -> None:
    """Seeds torch for the operation of this number, and this chunk of what it draws."""
    digest = hashlib.sha256((f"{seed}/{index}/{chunk}" if chunk else f"{seed}/{index}").encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))


def _on(device: torch.device, value: Any) -> Any:
    """Arguments with the device that they name in the place of the meta device."""
    if isinstance(value, tuple):
        return tuple(_on(device, item) for item in value)
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    return device if isinstance(value, torch.device) else value


def _part(tensor: torch.Tensor, starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The part of a tensor that begins at `starts` and has this shape."""
    return tensor[tuple(slice(start, start + extent) for start, extent in zip(starts, shape, strict=True))]


def _local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and where in the whole it begins."""
    starts = [0] * tensor.dim()
    if not isinstance(tensor, DTensor):
        return tensor, tuple(starts)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for axis, (place, placement) in enumerate(zip(coordinate, tensor.placements, strict=True)):
        if isinstance(placement, Shard):
            starts[placement.dim] = place * -(-tensor.shape[placement.dim] // tensor.device_mesh.size(axis))
    return tensor.to_local(), tuple(starts)


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
