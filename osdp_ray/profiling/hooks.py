"""What FSDP2 itself takes on a CPU, beside computing, collectives and copies: measured on chains of small units.

Every unit of a chain adds the sum of its parameters to what passes through. The same chain without FSDP2 is taken off,
and so are the chain's collectives, by the links' own costs at the smallest size that was measured for them: then a
unit's costs add up to what such a chain takes. What is left belongs to hooks, views and DTensors made anew, in Python.
Chains with one and with several tensors per unit tell the part of a unit from that of a tensor.
"""

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from osdp_ray.modeling import user_code
from osdp_ray.modeling.replicas import replicate_in_place
from osdp_ray.modeling.ring import scatter_in_rings
from osdp_ray.profiling.compute import fit_line
from osdp_ray.profiling.links import SMALLEST_BYTES
from osdp_ray.records.profile import LinkCost, PassOverhead, UnitOverhead
from osdp_ray.workload import Workload

if TYPE_CHECKING:
    from osdp_ray.profiling.actors import MeasuringGroup

_NUM_UNITS = 6
_FEW, _MANY = 1, 9  # tensors of a unit
_UNIT_BYTES = SMALLEST_BYTES  # of collectives that are measured
_REPEATS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainSeconds:
    """Median seconds of one pass through a chain, per unit; `num_bytes` are a unit's gathered parameters."""

    num_bytes: int
    forward_s: float
    backward_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chains:
    """What one rank measured: chains by (is_sharded, regather, tensors per unit), and a root that has no units."""

    chains: dict[tuple[bool, bool, int], ChainSeconds]
    root_s: float


def measure_hooks(
    group: "MeasuringGroup", links: tuple[LinkCost, ...], slowdown_fraction: float
) -> tuple[tuple[UnitOverhead, ...], float]:
    """The overhead of a sharded and of a replicated unit, and seconds of a root per pass, by the slowest rank.

    On GPUs the hooks run ahead of the device and cost nothing: () and 0.
    """
    if group.cluster.device_kind == "cuda":
        return (), 0.0
    per_rank = group.run(time_chains)
    slowest = {
        key: max((rank.chains[key] for rank in per_rank), key=lambda one: one.forward_s + one.backward_s)
        for key in per_rank[0].chains
    }
    kinds = sorted({is_sharded for is_sharded, _, _ in slowest})
    overheads = tuple(_overhead(slowest, is_sharded, links, slowdown_fraction) for is_sharded in kinds)
    return overheads, max(rank.root_s for rank in per_rank)


def _overhead(
    measured: dict[tuple[bool, bool, int], ChainSeconds],
    is_sharded: bool,
    links: tuple[LinkCost, ...],
    slowdown_fraction: float,
) -> UnitOverhead:
    cost = {link.collective: link for link in links if link.group == "world"}

    def link_s(name: str, chain: ChainSeconds) -> float:
        return cost[name].seconds(chain.num_bytes)  # type: ignore[index]

    few, many = measured[(is_sharded, False, _FEW)], measured[(is_sharded, False, _MANY)]
    reduction = "reduce_scatter" if is_sharded else "all_reduce"
    forward = [c.forward_s - (link_s("all_gather", c) if is_sharded else 0.0) for c in (few, many)]
    hidden = 0.0 if is_sharded else 1 / (1 + slowdown_fraction)  # replicated units reduce late, see costs.streams
    backward = [c.backward_s - (1 - hidden) * link_s(reduction, c) for c in (few, many)]
    again = [measured[(is_sharded, True, number)] for number in (_FEW, _MANY)]
    regather = [
        c.backward_s - kept.backward_s - (link_s("all_gather", c) if is_sharded else 0.0)
        for c, kept in zip(again, (few, many), strict=True)
    ]
    parts: list[float] = []
    for of_few, of_many in (forward, regather, backward):
        per_tensor_s = max(0.0, (of_many - of_few) / (_MANY - _FEW))
        parts += [max(0.0, of_few - _FEW * per_tensor_s), per_tensor_s]
    return UnitOverhead(
        is_sharded=is_sharded,
        forward_s=parts[0],
        forward_s_per_tensor=parts[1],
        regather_s=parts[2],
        regather_s_per_tensor=parts[3],
        backward_s=parts[4],
        backward_s_per_tensor=parts[5],
    )


def pass_overhead(root_s: float, batch_s: list[dict[int, float]]) -> PassOverhead:
    """A root's seconds, and those of making batches, by the slowest rank for each size, as a line."""
    slowest = [(size, max(of_rank[size] for of_rank in batch_s)) for size in sorted(batch_s[0])]
    constant_s, sample_s = fit_line(slowest)
    return PassOverhead(pass_s=root_s + constant_s, sample_s=sample_s)


class _Small(nn.Module):
    """Adds the sums of `num` tensors, `_UNIT_BYTES` together, to what passes through."""

    def __init__(self, num: int, num_ranks: int) -> None:
        super().__init__()
        rows = -(-_UNIT_BYTES // (4 * num * num_ranks)) * num_ranks
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(rows)) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in self.tensors:
            x = x + tensor.sum()
        return x


def time_chains() -> Chains:
    """Runs on every rank of the default group at once."""
    num_ranks = dist.get_world_size()
    meshes = {
        True: init_device_mesh("cpu", (num_ranks,)),
        False: init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("replicate", "shard")),
    }
    chains: dict[tuple[bool, bool, int], ChainSeconds] = {}
    root_s = _root_s(meshes[True])
    for number in (_FEW, _MANY):
        plain = _time(_chain(number, num_ranks))
        for is_sharded in (False, True) if num_ranks > 1 else (False,):
            for regather in (False, True):
                model = _chain(number, num_ranks)
                for unit in model:
                    fully_shard(unit, mesh=meshes[is_sharded], reshard_after_forward=regather)
                    if not is_sharded:
                        replicate_in_place(unit)
                _finish(model, meshes[True])
                forward_s, backward_s = _time(model)
                chains[(is_sharded, regather, number)] = ChainSeconds(
                    num_bytes=_UNIT_BYTES,
                    forward_s=max(0.0, forward_s - plain[0]) / _NUM_UNITS,
                    backward_s=max(0.0, backward_s - plain[1] - root_s) / _NUM_UNITS,
                )
    return Chains(chains=chains, root_s=root_s)


def _chain(number: int, num_ranks: int) -> nn.Sequential:
    return nn.Sequential(*(_Small(number, num_ranks) for _ in range(_NUM_UNITS)))


def _finish(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if dist.get_backend() == "gloo":
        scatter_in_rings(model)


def _root_s(mesh: DeviceMesh) -> float:
    """Seconds of a root without units in a forward and a backward."""
    plain, root = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    _finish(root, mesh)
    return max(0.0, sum(_time(root)) - sum(_time(plain)))


def _time(model: nn.Module) -> tuple[float, float]:
    """Median seconds of forward and of backward, all ranks setting out together."""
    start = torch.zeros(8, requires_grad=True)
    rows: list[tuple[float, float]] = []
    for _ in range(_REPEATS + 1):
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_s = time.perf_counter()
        loss = model(start).sum()
        turned_s = time.perf_counter()
        loss.backward()
        rows.append((turned_s - began_s, time.perf_counter() - turned_s))
    return statistics.median(row[0] for row in rows[1:]), statistics.median(row[1] for row in rows[1:])


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
