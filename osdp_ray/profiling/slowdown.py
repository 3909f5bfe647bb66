"""How much longer computing takes beside a collective: the two share memory bandwidth, a GPU's processors, or cores.

A loop of matrix products is timed alone and while gathers are under way that outlast it.
"""

import math
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from osdp_ray.units import MIB

if TYPE_CHECKING:
    from osdp_ray.profiling.actors import MeasuringGroup

_GATHERED_BYTES = 4 * MIB
_WIDTH = {"cpu": 256, "cuda": 4096}
_LOOP_S = 0.03
_MOST_GATHERS = 200
_REPEATS = 5


def measure_slowdown(group: "MeasuringGroup") -> float:
    """The fraction by which computing beside a gather of the world takes longer, by the rank it slows the most."""
    return max(group.run(time_slowdown)) if group.cluster.num_ranks > 1 else 0.0


def time_slowdown() -> float:
    """Runs on every rank of the default group at once."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    matrix = torch.ones(_WIDTH[device.type], _WIDTH[device.type], device=device)
    shard = torch.ones(_GATHERED_BYTES // 4 // dist.get_world_size(), device=device)
    num_products = max(1, round(_agreed(_LOOP_S / _compute_s(matrix, 1))))
    alone_s = _agreed(statistics.median(_compute_s(matrix, num_products) for _ in range(_REPEATS)))
    gather_s = _agreed(_gather_s(shard))
    num_gathers = min(_MOST_GATHERS, 1 + math.ceil(2 * alone_s / gather_s))
    beside_s = []
    for _ in range(_REPEATS):
        dist.barrier()
        outputs = [shard.new_empty(shard.numel() * dist.get_world_size()) for _ in range(num_gathers)]
        works = [dist.all_gather_single(output, shard, async_op=True) for output in outputs]
        beside_s.append(_compute_s(matrix, num_products))
        for work in works:
            work.wait()
    return max(0.0, statistics.median(beside_s) / alone_s - 1)


def _compute_s(matrix: torch.Tensor, num_products: int) -> float:
    """Seconds of products on the stream that computes; what communicates on another is not waited for."""
    began_s = time.perf_counter()
    for _ in range(num_products):
        matrix @ matrix
    if matrix.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began_s


def _gather_s(shard: torch.Tensor) -> float:
    output = shard.new_empty(shard.numel() * dist.get_world_size())
    seconds = []
    for _ in range(3):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_gather_single(output, shard)
        if shard.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _agreed(value: float) -> float:
    """The largest of all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    agreed = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return float(agreed)
