"""What a save holds of a model and its optimizer: whole tensors under the model's own names, as regions of ranks.

A `Whole` is one tensor of the model as its author knows it; its regions are what this rank has of it: a shard, a slice
of a split operator, a shard of a slice, or all. Regions are written in pieces of at most 64 MiB, and of equal regions
on several ranks each piece by one of them, which all ranks work out alike without a word: so nothing is written twice,
nothing is gathered, and whoever reads holds one piece beside what it fills.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # torch 2.13

from osdp_ray.costs import SAVE_PIECE_BYTES
from osdp_ray.errors import SaveError
from osdp_ray.execution.save_values import plain
from osdp_ray.modeling.splitting import Slice, slices_of

MAX_PIECE_BYTES = SAVE_PIECE_BYTES
NEVER = -1  # the number of a copy that is read into and never written
Offsets = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a whole tensor on this rank: where it starts and its values.

    `num_copies` ranks hold the same, of which this is number `copy`; `group` names how they are grouped.
    """

    offsets: Offsets
    values: torch.Tensor
    copy: int = 0
    num_copies: int = 1
    group: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor by its whole shape, with the regions that this rank has: none where it has an empty shard."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: list[Region]


Wholes = dict[str, Whole]


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[Wholes, dict[str, dict[str, Any]]]:
    """All tensors by name, tied ones once, and the plain numbers of the optimizer's state by parameter.

    Names are `model.<name>` and `optimizer.<key>.<parameter name>`. Raises SaveError for state that fits no slice.
    """
    slices = slices_of(model)
    found: Wholes = {}
    seen: set[int] = set()
    for fqn, tensor in model.state_dict(keep_vars=True).items():  # its hooks put gathered parameters back into shards
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            piece = slices.get(fqn)
            is_parameter = isinstance(tensor, nn.Parameter)
            _add(found, f"model.{piece.name if piece else fqn}", tensor.detach(), piece, is_spread=is_parameter)
    values: dict[str, dict[str, Any]] = {}
    for fqn, parameter in model.named_parameters() if optimizer is not None else ():
        piece = slices.get(fqn)
        name = piece.name if piece else fqn
        for key, value in optimizer.state.get(parameter, {}).items():  # type: ignore[union-attr]
            full_name = f"optimizer.{key}.{name}"
            if not isinstance(value, torch.Tensor):
                if value is not None:
                    values.setdefault(name, {})[key] = plain(f"optimizer state {key!r} of {name!r}", value)
            elif value.shape == parameter.shape and value.dim() > 0:
                _add(found, full_name, value.detach(), piece, is_spread=True)
            elif piece is None or value.numel() == 1:
                if full_name not in found:  # a step count is the same for all slices of a parameter
                    _add(found, full_name, value.detach(), None, is_spread=False)
            else:
                raise _unfit(key, name, tuple(value.shape), tuple(parameter.shape))
    return found, values


def _unfit(key: str, name: str, shape: tuple[int, ...], of_slice: tuple[int, ...]) -> SaveError:
    return SaveError(
        "",
        f"optimizer state {key!r} of {name!r} has shape {shape}, and a slice of the parameter {of_slice}, so slices "
        "of it make no whole",
        "Use an optimizer whose state has the shape of its parameters, or a plan without splits",
    )


def _add(found: Wholes, name: str, tensor: torch.Tensor, piece: Slice | None, *, is_spread: bool) -> None:
    """Adds a tensor of this rank to the whole it belongs to. What is not `is_spread` is written by the first rank."""
    shape, start = tuple(tensor.shape), [0] * tensor.dim()
    if piece is not None:
        shape = tuple(piece.shape)
        start[piece.dim] = piece.start
    whole = found.setdefault(name, Whole(shape, tensor.dtype, []))
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        copy, num_copies = 0, 1
        axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return
        for axis in axes:
            copy, num_copies = copy * mesh.size(axis) + coordinate[axis], num_copies * mesh.size(axis)
        group: tuple[Any, ...] = (tuple(mesh.shape), tuple(axes))
        values = tensor.to_local()
    else:
        offsets, values, group = (0,) * tensor.dim(), tensor, ()
        copy, num_copies = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if values.numel() == 0 and math.prod(shape) > 0:
        return
    if not is_spread:  # buffers may differ between ranks: those of one rank belong together
        copy, num_copies = (0 if copy == 0 else NEVER), 1
    where = tuple(offset + first for offset, first in zip(offsets, start, strict=True))
    whole.regions.append(Region(offsets=where, values=values, copy=copy, num_copies=num_copies, group=group))


def own(tensor: torch.Tensor) -> Whole:
    """A tensor that this rank alone has."""
    return Whole(tuple(tensor.shape), tensor.dtype, [Region(offsets=(0,) * tensor.dim(), values=tensor)])


def pieces_to_write(wholes: Wholes) -> dict[str, list[tuple[Offsets, torch.Tensor]]]:
    """What this rank writes of every tensor: of equal pieces the rank with the fewest bytes so far takes one."""
    written_bytes: dict[tuple[Any, ...], list[int]] = {}
    chosen: dict[str, list[tuple[Offsets, torch.Tensor]]] = {}
    for name, whole in wholes.items():
        chosen[name] = []
        for region in whole.regions:
            counts = written_bytes.setdefault((*region.group, region.num_copies), [0] * region.num_copies)
            for offsets, values in _pieces(region):
                writer = counts.index(min(counts))
                counts[writer] += values.numel() * values.element_size()
                if writer == region.copy:
                    chosen[name].append((offsets, values))
    return chosen


def _pieces(region: Region) -> Iterator[tuple[Offsets, torch.Tensor]]:
    """Rows of a region, as many as make 64 MiB."""
    values = region.values
    if values.dim() == 0 or values.numel() == 0:
        yield region.offsets, values
        return
    num_rows = values.shape[0]
    rows = max(1, MAX_PIECE_BYTES * num_rows // (values.numel() * values.element_size()))
    for first in range(0, num_rows, rows):
        yield (region.offsets[0] + first, *region.offsets[1:]), values[first : first + rows]


def allocate_state(optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Gives every parameter the state tensors that a save's index has for it, sharded and sliced as the parameter is.

    An optimizer makes them in its first step; taking one only to have them would need a whole set of gradients. Of a
    scalar that slices have in common only the first gets one: see `share_scalars`.
    """
    owners = _owners(model)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for full_name, stored in saved.items():
        kind, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        if kind != "optimizer":
            continue
        size, dtype = tuple(stored.size), stored.properties.dtype
        for number, (parameter, piece) in enumerate(owners.get(name, ())):
            if parameter not in groups:
                continue
            if size == (tuple(piece.shape) if piece else tuple(parameter.shape)) and size:
                tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            elif math.prod(size) > 1:
                if piece is not None:
                    raise _unfit(key, name, size, tuple(parameter.shape))
                tensor = parameter.detach().new_zeros(size, dtype=dtype)  # as optimizers make it themselves
            elif number > 0:
                continue
            else:
                # torch's own rule: a step count lives on the CPU unless the update reads it on the device
                on_device = groups[parameter].get("fused") or groups[parameter].get("capturable") or key != "step"
                tensor = torch.zeros(size, dtype=dtype, device=parameter.device if on_device else "cpu")
            optimizer.state[parameter][key] = tensor


def share_scalars(optimizer: torch.optim.Optimizer, model: nn.Module, values: dict[str, dict[str, Any]]) -> None:
    """Gives all slices of a parameter what they have in common: scalars of their own, and plain numbers."""
    for name, slices in _owners(model).items():
        first = optimizer.state.get(slices[0][0], {})
        for parameter, _ in slices:
            if values.get(name):
                optimizer.state[parameter].update(values[name])
            for key, value in first.items():
                if isinstance(value, torch.Tensor) and key not in optimizer.state[parameter]:
                    optimizer.state[parameter][key] = value.clone()


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Parameter, Slice | None]]]:
    """The parameters by the name that a save knows: one, or the slices of one."""
    slices = slices_of(model)
    owners: dict[str, list[tuple[nn.Parameter, Slice | None]]] = {}
    for fqn, parameter in model.named_parameters():
        piece = slices.get(fqn)
        owners.setdefault(piece.name if piece else fqn, []).append((parameter, piece))
    return owners


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules give as extra state that is no tensor, by name."""
    state = model.state_dict(keep_vars=True)
    return {
        name: plain(f"the extra state {name!r}", value)
        for name, value in state.items()
        if not isinstance(value, torch.Tensor)
    }


def set_extra_state(model: nn.Module, filled: Wholes, values: dict[str, Any]) -> None:
    """Hands modules back their extra state: the tensors that were filled, and plain values."""
    state: dict[str, Any] = dict(values)
    for name, whole in filled.items():
        if name.endswith("._extra_state") and whole.regions:
            state[name.removeprefix("model.")] = whole.regions[0].values
    if state:
        model.load_state_dict(state, strict=False)
