"""Steps under our plans against the same model by hand: seconds and peak bytes, in pairs that take turns.

    sharded      every operator sharded                  FSDP2: `fully_shard` per block, then the model
    replicated   every operator replicated (DP)          DistributedDataParallel
    hybrid       every operator sharded inside nodes     FSDP2 by hand over the mesh (nodes, ranks of a node)

FSDP2 keeps what belongs to no block gathered from forward to backward, and so do stem and head of our plans.

`python benchmarks/executor.py`: 2 and 4 gloo ranks of one thread each train our GPT; the two of a pair live in the same
processes and step in turns, so that whatever disturbs a machine disturbs both. A step is forward, backward, clipping as
each one's users do it, AdamW. Ratios are of median step seconds of the slowest rank, and of the highest rank's peak.
"""

import gc
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import machine, parse_flags, write_figures
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from osdp_ray.execution import build_on_meta, clip_grad_norm, parallelize
from osdp_ray.observation import AllocatorPeak, persistent_bytes
from osdp_ray.planning.choices import DP, HSDP, HSDP2, ZERO2, ZERO3, uniform_sections
from osdp_ray.profiling.trace import trace
from osdp_ray.records.plan import Choice
from osdp_ray.records.profile import Profile
from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes
from osdp_ray.workloads.gpt import GptWorkload
from tests.oracle import make_plan, traced_profile

WORLDS = ((2,), (2, 2))  # ranks per node
CHOICES = {"sharded": (ZERO3, ZERO2), "replicated": (DP, DP), "hybrid": (HSDP, HSDP2)}  # blocks, stem and head
PEERS = {"sharded": "fsdp2", "replicated": "ddp", "hybrid": "fsdp2"}
MICRO_BATCH, MAX_NORM, NUM_WARM_UP = 4, 1.0, 3


def main() -> None:
    flags = parse_flags(__doc__ or "")
    num_pairs = 3 if flags.quick else 30
    figures: dict = {"by_ranks": {}}
    rows = []
    for ranks_per_node in WORLDS[-1:] if flags.quick else WORLDS:
        pairs = run_world(ranks_per_node, num_pairs, is_small=flags.quick)
        for name, found in pairs.items():
            key = f"{name}_over_{PEERS[name]}"
            figures["by_ranks"].setdefault(key, {})[str(sum(ranks_per_node))] = found
            rows.append(_row(sum(ranks_per_node), name, found))
    for key, by_ranks in figures["by_ranks"].items():  # the worst of the worlds stands for all
        figures[key] = max(found["ratio"] for found in by_ranks.values())
        figures[f"{key}_peak_bytes"] = max(found["peak_ratio"] for found in by_ranks.values())
    header = ("ranks", "pair", "ours s", "by hand s", "ratio", "ours peak", "by hand peak", "ratio")
    print(format_table(header, rows))
    print(f"\nmedians of {num_pairs} steps each, in turns. {machine()}")
    write_figures(flags.json, figures)


def _row(num_ranks: int, name: str, found: dict) -> tuple[str, ...]:
    return (
        str(num_ranks),
        f"{name} / {PEERS[name]}",
        f"{found['ours_s']:.4f}",
        f"{found['peer_s']:.4f}",
        f"{found['ratio']:.3f} (halves {found['ratio_of_halves'][0]:.3f}, {found['ratio_of_halves'][1]:.3f})",
        format_bytes(found["ours_peak_bytes"]),
        format_bytes(found["peer_peak_bytes"]),
        f"{found['peak_ratio']:.3f}",
    )


def run_world(ranks_per_node: tuple[int, ...], num_pairs: int, *, is_small: bool) -> dict:
    """Pair -> its figures over all ranks."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        arguments = (ranks_per_node, port, num_pairs, is_small, folder)
        mp.spawn(run_rank, arguments, nprocs=sum(ranks_per_node))
        by_rank = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    return {name: _joined([found[name] for found in by_rank]) for name in by_rank[0]}


def _joined(by_rank: list[dict]) -> dict:
    """Every step lasts as long as its slowest rank."""
    seconds = {
        side: [max(step) for step in zip(*(found[side]["step_s"] for found in by_rank), strict=True)]
        for side in ("ours", "peer")
    }
    peaks = {side: max(found[side]["peak_bytes"] for found in by_rank) for side in ("ours", "peer")}
    half = len(seconds["ours"]) // 2
    return {
        "ours_s": statistics.median(seconds["ours"]),
        "peer_s": statistics.median(seconds["peer"]),
        "ratio": _ratio(seconds, 0, None),
        "ratio_of_halves": [_ratio(seconds, 0, half), _ratio(seconds, half, None)],
        "ours_peak_bytes": peaks["ours"],
        "peer_peak_bytes": peaks["peer"],
        "peak_ratio": peaks["ours"] / peaks["peer"],
    }


def _ratio(seconds: dict[str, list[float]], first: int, last: int | None) -> float:
    return statistics.median(seconds["ours"][first:last]) / statistics.median(seconds["peer"][first:last])


def run_rank(
    rank: int, ranks_per_node: tuple[int, ...], port: int, num_pairs: int, is_small: bool, folder: str
) -> None:
    torch.set_num_threads(1)
    num_ranks = sum(ranks_per_node)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    size = {"layers": 2, "hidden": 256} if is_small else {"layers": 8, "hidden": 384}
    workload = GptWorkload(heads=4, sequence=128, data=__file__, **size)
    profile = traced_profile(workload, trace(workload), ranks_per_node=ranks_per_node)
    found = {}
    for name, choices in CHOICES.items():
        if name == "hybrid" and len(ranks_per_node) == 1:
            continue
        sides = {"ours": _ours(workload, profile, *choices), "peer": _BY_HAND[name](workload, ranks_per_node)}
        found[name] = _take_turns(sides, num_pairs)
        del sides
        gc.collect()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _take_turns(sides: dict, num_pairs: int) -> dict:
    results: dict = {side: {"step_s": []} for side in sides}
    for side, trainee in sides.items():
        for _ in range(NUM_WARM_UP - 1):
            trainee.step()
        with AllocatorPeak("cpu").measure(NUM_WARM_UP, trainee.live_bytes) as memory:
            trainee.step()
        results[side]["peak_bytes"] = memory.peak_bytes
    gc.collect()
    gc.disable()
    for number in range(num_pairs):
        for side in sorted(sides, reverse=bool(number % 2)):  # who goes first may matter, too
            dist.barrier()
            start_s = time.perf_counter()
            sides[side].step()
            results[side]["step_s"].append(time.perf_counter() - start_s)
    gc.enable()
    return results


class Trainee:
    """A model that trains on batches of its own, and how it clips."""

    def __init__(self, workload: GptWorkload, model: torch.nn.Module, clip: Callable[..., Any]) -> None:
        self.workload, self.model, self.clip = workload, model, clip
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)
        self.batches = workload.build_batches(dist.get_rank(), dist.get_world_size(), MICRO_BATCH, 0, 0)

    def step(self) -> None:
        self.workload.loss(self.model, next(self.batches)).backward()
        self.clip(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def live_bytes(self) -> int:
        return persistent_bytes(self.model, self.optimizer, ())


def _ours(workload: GptWorkload, profile: Profile, in_blocks: Choice, outside: Choice) -> Trainee:
    pairs = zip(*(uniform_sections(profile, choice, "none") for choice in (in_blocks, outside)), strict=True)
    sections = tuple(block if block.is_block else other for block, other in pairs)
    plan = make_plan(profile, sections, micro_batch=MICRO_BATCH, accumulation=1, prefetch=profile.default_prefetch)
    model, initialisation = build_on_meta(workload)
    initialisation.materialize(parallelize(model, plan), "cpu", 0)
    return Trainee(workload, model, clip_grad_norm)


def _by_fsdp2(workload: GptWorkload, ranks_per_node: tuple[int, ...], *, is_hybrid: bool = False) -> Trainee:
    shape = (len(ranks_per_node), ranks_per_node[0]) if is_hybrid else (sum(ranks_per_node),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model, initialisation = build_on_meta(workload)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    initialisation.materialize(fully_shard(model, mesh=mesh), "cpu", 0)
    return Trainee(workload, model, torch.nn.utils.clip_grad_norm_)


def _by_ddp(workload: GptWorkload, ranks_per_node: tuple[int, ...]) -> Trainee:
    model, initialisation = build_on_meta(workload)
    initialisation.materialize(model, "cpu", 0)
    return Trainee(workload, DistributedDataParallel(model), torch.nn.utils.clip_grad_norm_)


_BY_HAND = {
    "sharded": _by_fsdp2,
    "replicated": _by_ddp,
    "hybrid": lambda workload, ranks_per_node: _by_fsdp2(workload, ranks_per_node, is_hybrid=True),
}

if __name__ == "__main__":
    main()
