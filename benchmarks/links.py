"""Every collective on every kind of group, measured on a test bed: the fits of a profile, and how right they are at
sizes that were not fitted; and what the ring scatter saves over gloo's own, in bytes on the wire and in seconds.

`python benchmarks/links.py`: two nodes of two ranks (see benchmarks/cluster) at two speeds of the links. With several
speeds the fits of each are their own. Bytes are those of the first node's interface.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import TestBed
from harness import machine, write_figures
from trials import Kept, attach, bed_flags, inside_bed, skip_without_bed, time_collectives_of

from osdp_ray.modeling.ring import RingReduceScatter
from osdp_ray.profiling.actors import MeasuringGroup
from osdp_ray.profiling.links import group_members, measure_links, measure_node_links
from osdp_ray.schema import format_table, read_json
from osdp_ray.units import KIB, MIB, format_bytes, format_seconds

MBIT = (400.0, 100.0)
HELD_OUT = (96 * KIB, 700 * KIB, 3 * MIB, 10 * MIB)
IN_A_ROW = 4
SCATTER_BYTES = 16 * MIB


def main() -> None:
    flags = bed_flags(__doc__ or "")
    if flags.inside is not None:
        measure(flags.inside, flags.kept, is_quick=flags.quick)
        return
    skip_without_bed()
    speeds = flags.mbit or (MBIT[:1] if flags.quick else MBIT)
    with tempfile.TemporaryDirectory() as folder:
        kept = (flags.kept or Path(folder) / "kept.json").resolve()
        with TestBed(num_nodes=2, slots_per_node=2, link_mbit=speeds[0]) as bed:
            for mbit in speeds:
                bed.shape(mbit)
                inside_bed(__file__, f"{mbit:g}", bed, kept, is_quick=flags.quick, timeout_s=1800)
        values = read_json(kept)
    write_figures(flags.json, report({mbit: values[f"{mbit:g}"] for mbit in speeds}))


def measure(speed: str, path: Path, *, is_quick: bool) -> None:
    """Inside the bed, at one speed."""
    kept = Kept(path, is_fresh=False)
    kept.get(speed, lambda: _measure(is_quick=is_quick))


def _measure(*, is_quick: bool) -> dict[str, Any]:
    cluster = attach()
    repeats = 3 if is_quick else 5
    with MeasuringGroup(cluster) as group:
        links = measure_links(group, largest_bytes=16 * MIB, limit_s=6.0 if is_quick else 30.0)
        members = group_members(cluster.ranks_per_node)
        held_out = []
        for link in links:
            for num_bytes in HELD_OUT[: 2 if is_quick else None]:
                calls = [(link.group, link.collective, num_bytes)] * IN_A_ROW
                taken = max(group.run(time_collectives_of, members, calls, repeats)) / IN_A_ROW
                held_out.append([link.group, link.collective, num_bytes, link.seconds(num_bytes), taken])
        scatters = {
            name: [max(values) for values in zip(*group.run(time_scatter, name, repeats), strict=True)]
            for name in ("gather", "gloo", "ring")
        }
        return {
            "links": [
                [link.group, link.collective, link.latency_s, link.bytes_per_s, link.residual_fraction]
                for link in links
            ],
            "held_out": held_out,
            "scatters": scatters,
            "node_links_bytes_per_s": measure_node_links(group),
        }


def time_scatter(name: str, repeats: int) -> tuple[float, float]:
    """Runs on every rank of the world: median seconds of one call, and bytes that its node has sent for it."""
    num_ranks, group = dist.get_world_size(), dist.group.WORLD
    whole = torch.ones(SCATTER_BYTES // 4)
    shard = torch.empty(whole.numel() // num_ranks)
    ring = RingReduceScatter()
    calls = {
        "gather": lambda: dist.all_gather_single(torch.empty_like(whole), shard, group=group),
        "gloo": lambda: dist.reduce_scatter_single(shard, whole, op=dist.ReduceOp.AVG, group=group),
        "ring": lambda: ring(shard, whole, group, dist.ReduceOp.AVG),
    }
    calls[name]()
    seconds, sent = [], []
    for _ in range(repeats):
        dist.barrier()
        before = _sent_bytes()
        began = time.perf_counter()
        calls[name]()
        seconds.append(time.perf_counter() - began)
        dist.barrier()
        sent.append(_sent_bytes() - before)
    return statistics.median(seconds), statistics.median(sent)


def _sent_bytes() -> int:
    """Bytes that have left this node's interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def report(by_speed: dict[float, dict[str, Any]]) -> dict[str, Any]:
    """Prints the tables and returns the figures."""
    errors: list[float] = []
    figures: dict[str, Any] = {}
    for mbit, found in by_speed.items():
        print(f"\n{mbit:g} Mbit/s\n")
        rows = [
            (kind, name, format_seconds(latency_s), f"{format_bytes(rate)}/s", f"{residual * 100:.0f} %")
            for kind, name, latency_s, rate, residual in found["links"]
        ]
        print(format_table(("group", "collective", "latency", "bandwidth", "median residual"), rows), "\n")
        rows = []
        for kind, name, num_bytes, fitted_s, taken_s in found["held_out"]:
            errors.append(fitted_s / taken_s - 1)
            row = (kind, name, format_bytes(num_bytes), format_seconds(fitted_s), format_seconds(taken_s))
            rows.append((*row, f"{errors[-1] * 100:+.0f} %"))
        print(format_table(("group", "collective", "not fitted", "predicted", "measured", "error"), rows), "\n")
        wire = {name: sent for name, (_, sent) in found["scatters"].items()}
        rows = [
            (
                {"gather": "gather", "gloo": "scatter, gloo's own", "ring": "scatter, in a ring"}[name],
                format_seconds(seconds),
                format_bytes(sent),
                f"{sent / wire['gather']:.2f}",
            )
            for name, (seconds, sent) in found["scatters"].items()
        ]
        title = f"{format_bytes(SCATTER_BYTES)} over the world"
        print(format_table((title, "seconds", "sent by a node", "of a gather's"), rows))
        figures[f"{mbit:g}"] = {
            "ring_over_gloo_bytes": wire["ring"] / wire["gloo"],
            "ring_over_gloo_seconds": found["scatters"]["ring"][0] / found["scatters"]["gloo"][0],
            **found,
        }
    mean = statistics.fmean(map(abs, errors))
    print(f"\n{len(errors)} sizes that were not fitted: mean error {mean * 100:.1f} %")
    print(machine())
    return {
        "num_held_out": len(errors),
        "error_mean_fraction": mean,
        "error_max_fraction": max(map(abs, errors)),
        "ring_over_gloo_bytes": max(of["ring_over_gloo_bytes"] for of in figures.values()),
        "ring_over_gloo_seconds": max(of["ring_over_gloo_seconds"] for of in figures.values()),
        "by_mbit": figures,
    }


if __name__ == "__main__":
    main()
