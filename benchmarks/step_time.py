"""Predicted against measured step time on two nodes of two ranks, over many plans, at two speeds of the links.

`python benchmarks/step_time.py`: a test bed comes up (see benchmarks/cluster), the model is profiled once per speed,
every plan is predicted from that profile alone and then trained for some steps by the executor's loop. Communication
and computing are compared on their own as well: a plan's collectives without computing, the model without sharding.
"""

import dataclasses
import itertools
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cluster import TestBed
from harness import machine, write_figures
from trials import (
    Kept,
    attach,
    bed_flags,
    blocks_in_turn,
    collectives_of,
    in_slices,
    inside_bed,
    kept_profile,
    operators_in_turn,
    plan_of,
    predicted_link_s,
    skip_without_bed,
    time_collectives_of,
    time_computing,
    try_plan,
    uniform,
)

from osdp_ray.costs import section_seconds
from osdp_ray.planning.choices import DP, HSDP, HSDP2, ZERO2, ZERO3
from osdp_ray.profiling.actors import MeasuringGroup
from osdp_ray.profiling.links import group_members
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.schema import format_table, read_json
from osdp_ray.workloads.gpt import GptWorkload

MBIT = (400.0, 100.0)
CHOICES = {"DP": DP, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3, "HSDP-2": HSDP2, "HSDP": HSDP}
WORKLOAD = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 64}


def plans(profile: Profile, *, is_quick: bool) -> dict[str, Plan]:
    """The plans by name: uniform ones, recomputation, mixes by block and by operator, accumulation."""
    found = {}
    for (name, choice), micro_batch in itertools.product(CHOICES.items(), (2, 8)):
        found[f"{name}, micro-batch {micro_batch}"] = plan_of(
            profile, uniform(profile, choice), micro_batch=micro_batch
        )
    for name, recompute in itertools.product(("DP", "ZeRO-3", "HSDP"), ("selective", "full")):
        sections = uniform(profile, CHOICES[name], recompute)
        found[f"{name}, recompute {recompute}, micro-batch 4"] = plan_of(profile, sections, micro_batch=4)
    for names in (("DP", "ZeRO-3"), ("ZeRO-2", "ZeRO-3"), ("HSDP", "ZeRO-3"), ("DP", "HSDP")):
        sections = blocks_in_turn(profile, [CHOICES[name] for name in names])
        found[f"blocks {' and '.join(names)}, micro-batch 4"] = plan_of(profile, sections, micro_batch=4)
    for names in (("DP", "ZeRO-3"), ("ZeRO-3", "HSDP"), ("DP", "ZeRO-2", "HSDP")):
        sections = operators_in_turn(profile, [CHOICES[name] for name in names])
        found[f"operators {', '.join(names)}, micro-batch 4"] = plan_of(profile, sections, micro_batch=4)
    for recomputes in (("none", "full"), ("full", "none", "none")):
        sections = blocks_in_turn(profile, [ZERO3], recomputes)
        found[f"ZeRO-3, recompute {'/'.join(recomputes)}, micro-batch 8"] = plan_of(profile, sections, micro_batch=8)
    for names, num_slices in ((("ZeRO-3",), 4), (("DP", "ZeRO-3"), 2)):
        sections = in_slices(profile, tuple(CHOICES[name] for name in names), num_slices)
        found[f"{' and '.join(names)}, {num_slices} slices, micro-batch 4"] = plan_of(profile, sections, micro_batch=4)
    found["ZeRO-3, 2 x micro-batch 2"] = plan_of(profile, uniform(profile, ZERO3), micro_batch=2, accumulation=2)
    found["DP, 2 x micro-batch 4"] = plan_of(profile, uniform(profile, DP), micro_batch=4, accumulation=2)
    if is_quick:
        wanted = ("DP, micro-batch 2", "ZeRO-3, micro-batch 2", "HSDP, micro-batch 8", "operators DP, ZeRO-3")
        found = {name: plan for name, plan in found.items() if name.startswith(wanted)}
    return found


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
                inside_bed(__file__, f"{mbit:g}", bed, kept, is_quick=flags.quick, timeout_s=7200)
        values = read_json(kept)
    figures = report({mbit: values[f"{mbit:g}"] for mbit in speeds})
    write_figures(flags.json, figures)


def measure(speed: str, path: Path, *, is_quick: bool) -> None:
    """Inside the bed, at one speed: everything predicted and measured goes to the file."""
    kept = Kept(path, is_fresh=False)
    workload, cluster = GptWorkload(**WORKLOAD), attach()
    profile, profile_s = kept_profile(kept, f"{speed} profile", workload, cluster)
    repeats = 2 if is_quick else 7
    rows = []
    with MeasuringGroup(cluster) as group:
        members = group_members(cluster.ranks_per_node)
        for name, plan in plans(profile, is_quick=is_quick).items():

            def once(plan: Plan = plan) -> dict[str, Any]:
                return dataclasses.asdict(try_plan(group, workload, plan, num_steps=repeats))

            trial = kept.get(f"{speed} step {name}", once)
            rows.append(
                {
                    "name": name,
                    "predicted_s": plan.prediction.step_s,
                    "predicted_by_phase": plan.prediction.step_s_by_phase,
                    "step_s": trial["step_s"],
                    "forward_s": trial["forward_s"],
                    "backward_s": trial["backward_s"],
                    "optimizer_s": trial["optimizer_s"],
                }
            )
            print(
                f"{speed} Mbit/s  {name}: {rows[-1]['predicted_s']:.3f} s, {statistics.median(trial['step_s']):.3f} s"
            )
        links = []
        for name in ("DP", "ZeRO-2", "ZeRO-3", "HSDP"):
            calls = collectives_of(profile, plan_of(profile, uniform(profile, CHOICES[name]), micro_batch=1))

            def talk(calls: list[tuple[str, str, int]] = calls) -> float:
                return max(group.run(time_collectives_of, members, calls, repeats))

            links.append(
                {
                    "name": name,
                    "predicted_s": predicted_link_s(profile, calls),
                    "measured_s": kept.get(f"{speed} links {name}", talk),
                }
            )
        computing = []
        for recompute, micro_batch in itertools.product(("none", "full"), (2,) if is_quick else (1, 2, 4, 8)):

            def compute(recompute: Any = recompute, micro_batch: int = micro_batch) -> float:
                return max(group.run(time_computing, workload, recompute, micro_batch, repeats))

            sections = uniform(profile, ZERO3, recompute)
            parts = [
                section_seconds(profile, described.class_index, section, micro_batch)
                for section, described in zip(sections, profile.sections, strict=True)
            ]
            computing.append(
                {
                    "name": f"recompute {recompute}, micro-batch {micro_batch}",
                    "predicted_s": sum(part.forward_s + part.backward_s for part in parts)
                    - profile.pass_overhead.pass_s
                    - profile.pass_overhead.sample_s * micro_batch,
                    "measured_s": kept.get(f"{speed} compute {recompute} {micro_batch}", compute),
                }
            )
    found = {"plans": rows, "links": links, "computing": computing, "profile_s": profile_s}
    found["slow_nodes"] = list(profile.slow_nodes())
    kept.replace(speed, found)


def report(by_speed: dict[float, dict[str, Any]]) -> dict[str, Any]:
    """Prints the tables and returns the figures."""
    errors: list[float] = []
    taus: dict[str, float] = {}
    parts: dict[str, list[float]] = {"links": [], "computing": []}
    for mbit, found in by_speed.items():
        print(f"\n{mbit:g} Mbit/s\n")
        table, predicted, measured = [], [], []
        for row in found["plans"]:
            step_s = statistics.median(row["step_s"])
            predicted.append(row["predicted_s"])
            measured.append(step_s)
            errors.append(row["predicted_s"] / step_s - 1)
            spread_fraction = (max(row["step_s"]) - min(row["step_s"])) / step_s
            table.append(
                (
                    row["name"],
                    f"{row['predicted_s']:.3f}",
                    f"{step_s:.3f}",
                    f"{errors[-1] * 100:+.1f} %",
                    f"{spread_fraction * 100:.0f} %",
                )
            )
        print(format_table(("plan", "predicted s", "measured s", "error", "spread of steps"), table))
        taus[f"{mbit:g}"] = kendall_tau(predicted, measured)
        for part, rows in parts.items():
            for row in found[part]:
                rows.append(row["predicted_s"] / row["measured_s"] - 1)
            print()
            columns = [
                (
                    row["name"],
                    f"{row['predicted_s']:.3f}",
                    f"{row['measured_s']:.3f}",
                    f"{(row['predicted_s'] / row['measured_s'] - 1) * 100:+.1f} %",
                )
                for row in found[part]
            ]
            title = "collectives of one step alone" if part == "links" else "computing of one micro-batch alone"
            print(format_table((title, "predicted s", "measured s", "error"), columns))
    mean = statistics.fmean(map(abs, errors))
    print(f"\n{len(errors)} plans: mean error {mean * 100:.1f} %, largest {max(map(abs, errors)) * 100:.1f} %,")
    print("Kendall tau " + ", ".join(f"{tau:.3f} at {speed} Mbit/s" for speed, tau in taus.items()))
    profile_s = max(found["profile_s"] for found in by_speed.values())
    print(f"a profile of the model on this cluster took {profile_s:.1f} s at most")
    print(machine())
    return {
        "profile_seconds": profile_s,
        "num_plans": len(errors),
        "error_mean_fraction": mean,
        "error_max_fraction": max(map(abs, errors)),
        "error_bias_fraction": statistics.fmean(errors),
        "kendall_tau": min(taus.values()),
        "kendall_tau_by_mbit": taus,
        "links_error_mean_fraction": statistics.fmean(map(abs, parts["links"])),
        "compute_error_mean_fraction": statistics.fmean(map(abs, parts["computing"])),
        "by_mbit": {f"{mbit:g}": found for mbit, found in by_speed.items()},
    }


def kendall_tau(one: list[float], other: list[float]) -> float:
    """Tau-a: the share of pairs in the same order, less that of pairs in the opposite one."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    signs = [math.copysign(1, (one[i] - one[j]) * (other[i] - other[j])) for i, j in pairs]
    return sum(signs) / len(pairs)


if __name__ == "__main__":
    main()
