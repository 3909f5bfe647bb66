"""Links: a MeasuringGroup -> the cost of every collective on every kind of group, and the speed of a local copy.

Each collective is timed with the calls that FSDP2 makes (the gather and the scatter allocate their output each time)
at sizes four times apart, of every repeat the slowest rank counts, and their medians are fitted by

    seconds = latency_s + num_bytes / bytes_per_s,     latency_s >= 0, bytes_per_s > 0

where num_bytes is the whole (gathered or unreduced) tensor. How far each point is from the line is kept, and a
LinkCost follows its points within bounds. No collective is derived from another. Over gloo the
reduce-scatter is the executor's own ring, since gloo's costs as much as an all-reduce.
"""

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from osdp_ray.modeling.ring import RingReduceScatter
from osdp_ray.records.profile import Collective, GroupKind, LinkCost
from osdp_ray.units import KIB, MIB

if TYPE_CHECKING:
    from osdp_ray.profiling.actors import MeasuringGroup

COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
SMALLEST_BYTES = 64 * KIB
LARGEST_BYTES = 64 * MIB
PAIR_BYTES = 512 * KIB
_LEAST_REPEATS, _MOST_REPEATS = 3, 9
_COPY_REPEATS = 9
_IN_A_ROW, _AT_ONCE = 2, 4
_GROWTH = 4  # from one size to the next
MIN_SIZES = 3  # below this many, one disturbed point would be the fit
FREE_BYTES_PER_S = 1e15  # what no link reaches: the bandwidth where there is no cost, for JSON has no infinity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one collective at one size, repeat by repeat, on one rank."""

    group: GroupKind
    collective: Collective
    num_bytes: int
    seconds: tuple[float, ...]


def measure_links(group: "MeasuringGroup", *, largest_bytes: int, limit_s: float = 3.0) -> tuple[LinkCost, ...]:
    """A LinkCost for each collective on each kind of group that the cluster has (see `group_members`).

    `largest_bytes` is the largest tensor worth measuring (a unit's gathered parameters), at most 64 MiB are. Sizes are
    left out, the largest first, where they would take longer than about `limit_s` altogether, but never the first
    three. All groups of a kind are at work together, as in training, so that what they share counts. A single rank
    communicates with nobody: its links cost nothing (latency 0, FREE_BYTES_PER_S).
    """
    members = group_members(group.cluster.ranks_per_node)
    if group.cluster.num_ranks == 1:
        return free_links()
    per_rank = group.run(time_collectives, members, measured_sizes(largest_bytes), limit_s)
    points: dict[tuple[GroupKind, Collective], dict[int, float]] = {}
    for timings in zip(*per_rank, strict=True):  # one collective at one size, by every rank
        slowest_s = map(max, zip(*(timing.seconds for timing in timings), strict=True))
        first = timings[0]
        points.setdefault((first.group, first.collective), {})[first.num_bytes] = statistics.median(slowest_s)
    links = []
    for (kind, name), seconds in points.items():
        latency_s, bytes_per_s, residual_fraction = fit_link(list(seconds), list(seconds.values()))
        fitted = {size: latency_s + size / bytes_per_s for size in seconds}
        links.append(
            LinkCost(
                group=kind,
                collective=name,
                latency_s=latency_s,
                bytes_per_s=bytes_per_s,
                residual_fraction=residual_fraction,
                residuals=tuple((size, taken_s / fitted[size] - 1) for size, taken_s in seconds.items()),
            )
        )
    return tuple(links)


def free_links() -> tuple[LinkCost, ...]:
    """The links of a single rank, which cost nothing."""
    return tuple(
        LinkCost(group="world", collective=name, latency_s=0.0, bytes_per_s=FREE_BYTES_PER_S, residual_fraction=0.0)
        for name in COLLECTIVES
    )


def measure_copy(group: "MeasuringGroup", num_bytes: int) -> float:
    """Bytes per second at which a device copies an fp32 tensor of this size to a new one, by the slowest of all."""
    return min(group.run(time_copy, num_bytes))


def measure_node_links(group: "MeasuringGroup") -> tuple[float | None, ...]:
    """Bytes per second of every node's faster link to its neighbours in the ring of nodes; None with a single node.

    A slow node has two slow links and its neighbours one each, so with three nodes or more the faster one tells whose
    link is slow. Of two nodes nobody can tell which one it is.
    """
    heads = group.one_rank_per_node
    if len(heads) == 1:
        return (None,)
    pairs = list(itertools.pairwise(heads)) + ([(heads[-1], heads[0])] if len(heads) > 2 else [])
    per_rank = group.run(time_pairs, pairs)
    seconds = [max(per_rank[one][index], per_rank[other][index]) for index, (one, other) in enumerate(pairs)]
    speeds = [PAIR_BYTES / taken_s for taken_s in seconds]
    return tuple(max(s for s, pair in zip(speeds, pairs, strict=True) if head in pair) for head in heads)


def time_pairs(pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Seconds of PAIR_BYTES there and of as many back at once, pair after pair; 0 where this rank has no part."""
    device, rank, found = _device(), dist.get_rank(), []
    leaving = torch.ones(PAIR_BYTES // 4, device=device)
    arriving = torch.empty_like(leaving)
    for pair in pairs:
        _agree(0.0)
        if rank not in pair:
            found.append(0.0)
            continue
        other = pair[0] if rank == pair[1] else pair[1]

        def exchange(other: int = other) -> None:
            works = [dist.P2POp(dist.irecv, arriving, other), dist.P2POp(dist.isend, leaving, other)]
            for work in dist.batch_isend_irecv(works):
                work.wait()

        exchange()
        found.append(statistics.median(_seconds(exchange) for _ in range(3)))
    return found


def group_members(ranks_per_node: Sequence[int]) -> dict[GroupKind, tuple[tuple[int, ...], ...]]:
    """The kinds of groups that differ on this layout, each with the ranks of its groups.

    'world' is there always. 'node' (the ranks of a node) and 'across' (equal local ranks of all nodes) are there with
    several nodes of several ranks each, equally many, as a device mesh needs; else they are the world or a rank.
    """
    num_nodes, num_ranks = len(ranks_per_node), sum(ranks_per_node)
    members: dict[GroupKind, tuple[tuple[int, ...], ...]] = {"world": (tuple(range(num_ranks)),)}
    per_node = ranks_per_node[0]
    if num_nodes > 1 and per_node > 1 and len(set(ranks_per_node)) == 1:
        members["node"] = tuple(tuple(range(first, first + per_node)) for first in range(0, num_ranks, per_node))
        members["across"] = tuple(tuple(range(local, num_ranks, per_node)) for local in range(per_node))
    return members


def measured_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Powers of four times 64 KiB up to `largest_bytes` (at most 64 MiB), and that size itself; three at least."""
    top_bytes = min(LARGEST_BYTES, max(largest_bytes, SMALLEST_BYTES * 4 ** (MIN_SIZES - 1)))
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * 4 <= top_bytes:
        sizes.append(sizes[-1] * 4)
    if top_bytes >= sizes[-1] * 1.5:
        sizes.append(top_bytes)
    return tuple(sizes)


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """latency_s, bytes_per_s and residual_fraction of the line that follows the points best, in relative terms.

    Of all rising lines through two of the points, or through one with latency 0, it is the one with the least sum of
    |log(line / point)|. A far point, slow or fast, moves such a line little, unlike least squares. A line with no cost
    per byte is no link, however well it follows points that noise has scattered. `seconds` are positive.
    """
    points = list(zip(sizes, seconds, strict=True))
    lines = [(0.0, taken_s / size) for size, taken_s in points]
    for (size, taken_s), (other_size, other_s) in itertools.combinations(points, 2):
        if size != other_size:
            s_per_byte = (other_s - taken_s) / (other_size - size)
            lines.append((taken_s - s_per_byte * size, s_per_byte))

    def ratios(line: tuple[float, float]) -> list[float]:
        return [(line[0] + line[1] * size) / taken_s for size, taken_s in points]

    possible = [line for line in lines if line[0] >= 0 and line[1] > 0]
    best = min(possible, key=lambda line: math.fsum(abs(math.log(ratio)) for ratio in ratios(line)))
    latency_s, s_per_byte = best
    bytes_per_s = 1 / s_per_byte if s_per_byte * FREE_BYTES_PER_S > 1 else FREE_BYTES_PER_S
    return latency_s, bytes_per_s, statistics.median(abs(ratio - 1) for ratio in ratios(best))


def time_collectives(
    members: dict[GroupKind, tuple[tuple[int, ...], ...]], sizes: tuple[int, ...], limit_s: float
) -> list[Timing]:
    """Runs on every rank of the default group at once. Every decision in it comes from agreed numbers.

    Each repeat goes through all cases in an order of its own: in training, too, collectives of all sizes follow one
    another, and what disturbs a while disturbs one repeat of many cases and not all repeats of one.
    """
    groups = {
        kind: dist.group.WORLD if kind == "world" else dist.new_subgroups_by_enumeration([list(m) for m in ranks])[0]
        for kind, ranks in members.items()
    }
    began_s = time.perf_counter()
    cases: list[tuple[GroupKind, Collective, int]] = []
    tensors: dict[int, torch.Tensor] = {}
    round_s = 0.0  # of every case once
    kinds = list(itertools.product(groups, COLLECTIVES))
    for index, (kind, name) in enumerate(kinds):
        prepared_collective(name, groups[kind], SMALLEST_BYTES)[1]()  # the first call opens connections
        for position, size in enumerate(sizes):
            num_bytes, call = prepared_collective(name, groups[kind], size, tensors)
            (warm_s,) = _agree(_seconds(call))
            cases.append((kind, name, num_bytes))
            round_s += warm_s
            share_s = limit_s * (index + 1) / len(kinds)
            least_rounds = 1 + _AT_ONCE * _LEAST_REPEATS
            if position + 1 >= MIN_SIZES and least_rounds * (round_s + _GROWTH * warm_s) > share_s:
                break
    (elapsed_s,) = _agree(time.perf_counter() - began_s)
    repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, int((limit_s - elapsed_s) / max(_AT_ONCE * round_s, 1e-9))))
    seconds: list[list[float]] = [[] for _ in cases]
    order, shuffled = list(range(len(cases))), random.Random(0)  # alike on every rank
    for _ in range(repeats):
        shuffled.shuffle(order)
        for index in order:
            kind, name, num_bytes = cases[index]
            call = prepared_collective(name, groups[kind], num_bytes, tensors)[1]
            is_late = (kind, name) == ("world", "all_reduce") and dist.get_backend() == "gloo"
            taken_s = _several_at_once(groups[kind], num_bytes) if is_late else _in_a_row(call)
            seconds[index].append(taken_s)
    return [
        Timing(group=kind, collective=name, num_bytes=num_bytes, seconds=tuple(taken))
        for (kind, name, num_bytes), taken in zip(cases, seconds, strict=True)
    ]


def time_copy(num_bytes: int) -> float:
    """Bytes per second of `copy_` from an fp32 tensor to a new one, on the actor's device.

    FSDP2 makes its buffers anew each time. On a CPU it depends on their size and on what was freed before whether
    their pages are new as well, which then cost more than the copy; after some rounds it is as amid training.
    """
    source = torch.ones(num_bytes // 4, device=_device())
    rows = []
    for _ in range(3 * _COPY_REPEATS):
        _agree(0.0)
        rows.append(_seconds(lambda: torch.empty_like(source).copy_(source)))
    return num_bytes / statistics.median(rows[-_COPY_REPEATS:])


def prepared_collective(
    name: Collective, group: dist.ProcessGroup, num_bytes: int, tensors: "dict[int, torch.Tensor] | None" = None
) -> tuple[int, Callable[[], object]]:
    """The bytes really moved (rounded up to whole fp32 shards), and the call as FSDP2 makes it.

    Calls that are given the same `tensors` share those of one size, so that many of them hold little.
    """
    num_ranks = group.size()
    shard_numel = -(-num_bytes // (4 * num_ranks))
    numel = shard_numel * num_ranks
    device = _device()
    whole, shard = (_shared_tensor(size, device, tensors) for size in (numel, shard_numel))
    scatter = RingReduceScatter() if dist.get_backend() == "gloo" else _scatter
    calls: dict[Collective, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_single(torch.empty_like(whole), shard, group=group),
        "reduce_scatter": lambda: scatter(torch.empty_like(shard), whole, group, dist.ReduceOp.AVG),
        "all_reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=group),
    }
    return numel * 4, calls[name]


def _shared_tensor(numel: int, device: torch.device, tensors: "dict[int, torch.Tensor] | None") -> torch.Tensor:
    found = None if tensors is None else tensors.get(numel)
    if found is None:
        found = torch.ones(numel, device=device)
        if tensors is not None:
            tensors[numel] = found
    return found


def _scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
    dist.reduce_scatter_single(output, whole, op=op, group=group)


def _seconds(call: Callable[[], object]) -> float:
    _synchronize()
    started_s = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - started_s


def _in_a_row(call: Callable[[], object]) -> float:
    """Seconds of one of a few, which all ranks begin together.

    The first does not count: it finds wires and queues rested. In training hardly any does, for a collective returns to
    one rank while it still goes on between others.
    """
    _agree(0.0)
    call()

    def row() -> None:
        for _ in range(_IN_A_ROW):
            call()

    return _seconds(row) / _IN_A_ROW


def _several_at_once(group: dist.ProcessGroup, num_bytes: int) -> float:
    """Seconds of one of a few reductions that run at once, as those of replicated units do over gloo."""
    tensors = [torch.ones(-(-num_bytes // 4)) for _ in range(_AT_ONCE)]
    _agree(0.0)

    def reduce_all() -> None:
        for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
            work.wait()

    return _seconds(reduce_all) / _AT_ONCE


def _agree(*values: float) -> list[float]:
    """The largest of each value over all ranks, the same on all; it also lines the ranks up."""
    agreed = torch.tensor(values, dtype=torch.float64, device=_device())
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return agreed.tolist()


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _synchronize() -> None:
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
