"""What FSDP2 itself takes on a CPU, beside computing and collectives: measured on chains of small units.

Every unit of a chain adds a sum over its parameters to what passes through. In turn pass the chain, the same chain
without FSDP2, and the chain's collectives alone; what the first takes longer than the others together belongs to hooks,
views and DTensors made anew, in Python, to copies, and to waiting where ranks share cores. Chains with one and with
several tensors per unit tell the part of a unit from that of a tensor. What grows with a unit's bytes beyond copies is
measured inside nodes alone: between them it is small beside what the links take, and lost in its noise. Replicated
units are measured without anybody to reduce with: in backward the others' reductions hide them.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from osdp_ray.modeling import user_code
from osdp_ray.modeling.replicas import replicate_in_place
from osdp_ray.modeling.ring import scatter_in_rings
from osdp_ray.profiling.compute import fit_line
from osdp_ray.profiling.links import SMALLEST_BYTES, group_members, prepared_collective
from osdp_ray.records.overheads import PassOverhead, ShardOver, UnitOverhead
from osdp_ray.records.profile import Collective
from osdp_ray.workload import Workload

if TYPE_CHECKING:
    from osdp_ray.profiling.actors import MeasuringGroup

_FEW, _MANY = 1, 9  # tensors of a unit
_NUM_UNITS, _NUM_LARGE_UNITS = 6, 3
_WARM_UPS, _REPEATS = 3, 7
_Pass = tuple[float, float]  # seconds of forward and of backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainSeconds:
    """What a unit of a chain takes beside computing and collectives, made ready once and after its gradients."""

    shard_over: ShardOver
    num_tensors: int
    num_bytes: int
    gather_s: float
    reduce_s: float


def measure_hooks(
    group: "MeasuringGroup", largest_bytes: int, copy_bytes_per_s: float
) -> tuple[tuple[UnitOverhead, ...], float]:
    """The overhead of a unit by who shares it, and seconds of a root per pass, by the slowest rank.

    `largest_bytes` is the largest unit worth measuring. On GPUs the hooks run ahead of the device and cost nothing:
    () and 0.
    """
    if group.cluster.device_kind == "cuda":
        return (), 0.0
    per_rank = group.run(time_chains, group.cluster.ranks_per_node, largest_bytes)
    slowest = [
        max(of_chain, key=lambda chain: chain.gather_s + chain.reduce_s)
        for of_chain in zip(*(chains for chains, _ in per_rank), strict=True)
    ]
    kinds = dict.fromkeys(chain.shard_over for chain in slowest)
    of_kind = ([chain for chain in slowest if chain.shard_over == kind] for kind in kinds)
    return tuple(unit_overhead(chains, copy_bytes_per_s) for chains in of_kind), max(root_s for _, root_s in per_rank)


def unit_overhead(chains: Sequence[ChainSeconds], copy_bytes_per_s: float) -> UnitOverhead:
    """What chains of units with few and with many tensors have in common, and where there are two more, of small and of
    large units, these. No part is below zero."""
    few, many, *sizes = chains
    parts: list[float] = []
    for name in ("gather_s", "reduce_s"):
        per_tensor_s = max(0.0, (getattr(many, name) - getattr(few, name)) / (many.num_tensors - few.num_tensors))
        per_byte_s = 0.0
        if sizes:
            small, large = sizes
            slope_s = (getattr(large, name) - getattr(small, name)) / (large.num_bytes - small.num_bytes)
            per_byte_s = max(0.0, slope_s - 1 / copy_bytes_per_s)
        constant_s = getattr(few, name) - per_tensor_s * few.num_tensors - per_byte_s * few.num_bytes
        parts += [max(0.0, constant_s), per_tensor_s, per_byte_s]
    return UnitOverhead(
        shard_over=few.shard_over,
        gather_s=parts[0],
        gather_s_per_tensor=parts[1],
        gather_s_per_byte=parts[2],
        reduce_s=parts[3],
        reduce_s_per_tensor=parts[4],
        reduce_s_per_byte=parts[5],
    )


def pass_overhead(root_s: float, batch_s: list[dict[int, float]]) -> PassOverhead:
    """A root's seconds, and those of making batches, by the slowest rank for each size, as a line."""
    slowest = [(size, max(of_rank[size] for of_rank in batch_s)) for size in sorted(batch_s[0])]
    constant_s, sample_s = fit_line(slowest)
    return PassOverhead(pass_s=root_s + constant_s, sample_s=sample_s)


class _Small(nn.Module):
    """Adds the sums of the squares of `num` tensors, `num_bytes` together, to what passes through."""

    def __init__(self, num: int, num_bytes: int, num_ranks: int) -> None:
        super().__init__()
        rows = -(-num_bytes // (4 * num * num_ranks)) * num_ranks
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(rows)) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in self.tensors:
            x = x + tensor.square().sum()  # whose gradient is a tensor of its own, as most are
        return x


def time_chains(ranks_per_node: tuple[int, ...], largest_bytes: int) -> tuple[list[ChainSeconds], float]:
    """Runs on every rank of the default group at once: chains of units with few and with many tensors, by who shares
    them, with a small and a large one of those inside nodes; and seconds of a root that has no units."""
    num_ranks = dist.get_world_size()
    names = ("replicate", "shard")
    world = init_device_mesh("cpu", (num_ranks,))
    meshes = {"none": init_device_mesh("cpu", (num_ranks, 1, 1), mesh_dim_names=("rank", *names))[names]}
    inner: tuple[str, DeviceMesh] | None = None
    if num_ranks > 1:
        meshes["world"] = world
        inner = ("world", world) if len(ranks_per_node) == 1 else None
    if "node" in group_members(ranks_per_node):
        nodes = meshes["node"] = init_device_mesh("cpu", (len(ranks_per_node), ranks_per_node[0]), mesh_dim_names=names)
        inner = "node", nodes["shard"]
    root_s = _root_s(world)
    measured = [
        (kind, mesh, _NUM_UNITS, number, SMALLEST_BYTES) for kind, mesh in meshes.items() for number in (_FEW, _MANY)
    ]
    if inner is not None and largest_bytes > SMALLEST_BYTES:
        measured += [(*inner, _NUM_LARGE_UNITS, 1, num_bytes) for num_bytes in (SMALLEST_BYTES, largest_bytes)]
    return [_chain_seconds(world, root_s, *one) for one in measured], root_s


def _chain_seconds(
    world: DeviceMesh, root_s: float, kind: Any, mesh: DeviceMesh, num_units: int, num_tensors: int, num_bytes: int
) -> ChainSeconds:
    """Of a chain of units of so many tensors, `num_bytes` together, sharded over the last dimension of a mesh."""
    plain, model = (
        nn.Sequential(*(_Small(num_tensors, num_bytes, world.size()) for _ in range(num_units))) for _ in range(2)
    )
    for unit in model:
        fully_shard(unit, mesh=mesh, reshard_after_forward=kind != "none")
        if kind == "none":
            replicate_in_place(unit)
    _finish(model, world)
    forward = [_collective("all_gather", mesh, num_bytes)] if kind != "none" else []
    backward = [*forward, _collective("reduce_scatter", mesh, num_bytes)] if kind != "none" else []
    if kind == "node" and mesh.ndim > 1:
        backward.append(_collective("all_reduce", mesh, num_bytes // mesh.size(-1), dim=0))
    whole, bare = _median(lambda: _seconds(model)), _median(lambda: _seconds(plain))
    links = _median(lambda: (_seconds_of(forward * num_units), _seconds_of(backward * num_units)))
    forward_s, backward_s = ((whole[i] - bare[i] - links[i] - i * root_s) / num_units for i in (0, 1))
    return ChainSeconds(
        shard_over=kind,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        gather_s=forward_s,
        reduce_s=backward_s - forward_s if kind != "none" else backward_s,  # a sharded one is made ready there, too
    )


def _collective(name: Collective, mesh: DeviceMesh, num_bytes: int, *, dim: int = -1) -> Callable[[], object]:
    return prepared_collective(name, mesh.get_group(dim % mesh.ndim), num_bytes)[1]


def _finish(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if dist.get_backend() == "gloo":
        scatter_in_rings(model)


def _root_s(mesh: DeviceMesh) -> float:
    """Seconds of a root without units in a forward and a backward."""
    plain, root = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    _finish(root, mesh)
    rows = [sum(_seconds(root)) - sum(_seconds(plain)) for _ in range(_REPEATS + 1)]
    return max(0.0, statistics.median(rows[1:]))


def _median(once: Callable[[], _Pass]) -> _Pass:
    """The medians of some passes, after a few that warm up: one kind at a time, as in training, where memory that one
    pass frees is what the next one gets, and little is new."""
    forward_s, backward_s = zip(*(once() for _ in range(_WARM_UPS + _REPEATS)), strict=True)
    return statistics.median(forward_s[_WARM_UPS:]), statistics.median(backward_s[_WARM_UPS:])


def _seconds(model: nn.Module) -> _Pass:
    """Seconds of forward and of backward, all ranks setting out together."""
    start = torch.zeros(8, requires_grad=True)
    model.zero_grad(set_to_none=True)
    dist.barrier()
    began_s = time.perf_counter()
    loss = model(start).sum()
    turned_s = time.perf_counter()
    loss.backward()
    return turned_s - began_s, time.perf_counter() - turned_s


def _seconds_of(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of calls one after the other, all ranks setting out together."""
    dist.barrier()
    began_s = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began_s


def time_batches(workload: Workload, micro_batches: tuple[int, ...]) -> dict[int, float]:
    """Median seconds of making one batch, by its size."""
    found = {}
    for micro_batch in micro_batches:
        batches = user_code.batches(workload, dist.get_rank(), dist.get_world_size(), micro_batch, 0, 0)
        next(batches)  # the first opens files
        rows = []
        for _ in range(_REPEATS):
            dist.barrier()
            began_s = time.perf_counter()
            next(batches)
            rows.append(time.perf_counter() - began_s)
        found[micro_batch] = statistics.median(rows)
    return found
