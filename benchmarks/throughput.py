"""Throughput of our plans against hand-made settings, all of them measured, on a test bed of two nodes of two ranks.

`python benchmarks/throughput.py`: model families x budgets x speeds of the links. For every family and speed the model
is profiled once; every uniform setting (DP, ZeRO-2, ZeRO-3, HSDP, each with and without recomputation, at every
micro-batch that divides the global batch) is trained for some steps, and so is our plan under each budget. A setting
counts under a budget where its peak fits. Then our plan is compared with

    best uniform   the fastest measured setting that fits
    default        ZeRO-3 with full recomputation at its fastest micro-batch that fits
    lower bound    the model computed without sharding on every rank at the fastest micro-batch: nothing is sent

The three train in turn, several rounds, after all settings have been measured once to find the best.

`--slow` measures instead what knowing a slow node and a slow link is worth: the bed is profiled equal and unequal, and
both plans train on the unequal one. `--kept FILE` goes on with measurements of a run that was cut short.
"""

import dataclasses
import hashlib
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import TestBed
from harness import machine, write_figures
from trials import (
    Kept,
    attach,
    bed_flags,
    inside_bed,
    kept_profile,
    plan_of,
    skip_without_bed,
    time_computing,
    try_plan,
    uniform,
)

from osdp_ray.costs import held_beside, simulate_bytes
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning import plan as make_plan
from osdp_ray.planning.choices import DP, HSDP, RECOMPUTES, ZERO2, ZERO3
from osdp_ray.profiling.actors import MeasuringGroup
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.schema import format_table, read_json
from osdp_ray.units import format_bytes
from osdp_ray.workload import Workload
from osdp_ray.workloads.families import FamilyWorkload, Stage
from osdp_ray.workloads.gpt import GptWorkload

MBIT = (400.0, 100.0)
GLOBAL_BATCH = 16
SETTINGS = {"DP": DP, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3, "HSDP": HSDP}
DEFAULT = "ZeRO-3 + full"
# Budgets, as the part of the way from the leanest plan's peak to the peak of the fastest setting without a budget.
BUDGET_FRACTIONS = (0.1, 0.35, 0.7)
SLOW_NODE = 1


def families() -> dict[str, Callable[[], Workload]]:
    """Small models of the three kinds; see osdp_ray.workloads.families."""

    def mixed() -> Workload:
        stages = (Stage(layers=3, hidden=128), Stage(layers=2, hidden=256), Stage(layers=1, hidden=384))
        workload = FamilyWorkload(stages, sequence=64)
        workload.vocabulary = 512
        return workload

    return {
        "narrow": lambda: GptWorkload(layers=10, hidden=128, heads=2, sequence=64),
        "wide": lambda: GptWorkload(layers=2, hidden=384, heads=6, sequence=64, vocabulary=512),
        "mixed": mixed,
    }


def main() -> None:
    flags = bed_flags(__doc__ or "", extra={"--slow": "what knowing a slow node and a slow link is worth"})
    if flags.inside is not None:
        task, _, argument = flags.inside.partition(" ")
        {"family": measure_family, "slow": measure_slow}[task](argument, flags.kept, is_quick=flags.quick)
        return
    skip_without_bed()
    with tempfile.TemporaryDirectory() as folder:
        kept = (flags.kept or Path(folder) / "kept.json").resolve()
        figures = _slow(flags, kept) if flags.slow else _all(flags, kept)
    write_figures(flags.json, figures)


def _all(flags: Any, kept: Path) -> dict[str, Any]:
    speeds = flags.mbit or (MBIT[:1] if flags.quick else MBIT)
    names = list(families())[: 1 if flags.quick else None]
    with TestBed(num_nodes=2, slots_per_node=2, link_mbit=speeds[0]) as bed:
        for mbit, name in itertools.product(speeds, names):
            bed.shape(mbit)
            inside_bed(__file__, f"family {name} {mbit:g}", bed, kept, is_quick=flags.quick, timeout_s=7200)
    values = read_json(kept)
    return report([case for mbit, name in itertools.product(speeds, names) for case in values[f"{name} {mbit:g}"]])


def measure_family(argument: str, path: Path, *, is_quick: bool) -> None:
    """Inside the bed: one family at one speed, all settings and our plans."""
    name, _, speed = argument.partition(" ")
    kept, workload, cluster = Kept(path, is_fresh=False), families()[name](), attach()
    profile, _ = kept_profile(kept, f"{argument} profile", workload, cluster)
    repeats = 2 if is_quick else 5
    with MeasuringGroup(cluster) as group:

        def measured(label: str, plan: Plan) -> list[float]:
            return kept.get(
                f"{argument} {label}",
                lambda: list(try_plan(group, workload, plan, num_steps=repeats, limit_s=600.0).step_s),
            )

        settings = uniform_plans(profile, is_quick=is_quick)
        steps = {}
        for label, plan in settings.items():
            steps[label] = measured(label, plan)
            median_s = statistics.median(steps[label])
            print(f"{argument} Mbit/s  {label}: {plan.prediction.step_s:.3f} s, {median_s:.3f} s", flush=True)

        def computing() -> float:
            return min(
                GLOBAL_BATCH / 4 / size * max(group.run(time_computing, workload, "none", size, repeats))
                for size in _micro_batches()
            )

        bound_s = kept.get(f"{argument} computing", computing)
        cases = []
        for fraction in BUDGET_FRACTIONS[: 1 if is_quick else None]:
            budget_bytes = budget_of(profile, settings, steps, fraction)
            ours = make_plan(profile, budget_bytes=budget_bytes, global_batch=GLOBAL_BATCH)
            peaks = {label: _device_bytes(profile, plan) for label, plan in settings.items()}
            fitting = {label: taken for label, taken in steps.items() if peaks[label] <= budget_bytes}
            best = min(fitting, key=lambda label: statistics.median(fitting[label]))
            default = min(
                (label for label in fitting if label.startswith(DEFAULT)),
                key=lambda label: statistics.median(fitting[label]),
            )
            rivals = {"ours": ours, "best": settings[best], "default": settings[default]}
            cases.append(
                {
                    "family": name,
                    "mbit": float(speed),
                    "budget_bytes": budget_bytes,
                    "ours_predicted_s": ours.prediction.step_s,
                    "best_uniform": best,
                    "num_fitting": len(fitting),
                    "bound_s": bound_s,
                    **in_turn(measured, rivals, 1 if is_quick else 3),
                }
            )
    kept.replace(argument, cases)


def in_turn(
    measured: Callable[[str, Plan], list[float]], rivals: dict[str, Plan], num_rounds: int
) -> dict[str, list[float]]:
    """Step seconds of rivals that train one after the other, round after round: what a machine does beside it, and how
    fast it is by and by, meets all of them."""
    steps: dict[str, list[float]] = {name: [] for name in rivals}
    for number, (name, plan) in itertools.product(range(num_rounds), rivals.items()):
        steps[name] += measured(f"round {number} {_decisions(plan)}", plan)
    return steps


def uniform_plans(profile: Profile, *, is_quick: bool) -> dict[str, Plan]:
    """Every uniform setting at every micro-batch, by name."""
    recomputes = RECOMPUTES[:: 2 if is_quick else 1]
    sizes = _micro_batches()[-1:] if is_quick else _micro_batches()
    return {
        f"{name}{'' if recompute == 'none' else f' + {recompute}'}, micro-batch {size}": plan_of(
            profile,
            uniform(profile, choice, recompute),
            micro_batch=size,
            accumulation=GLOBAL_BATCH // (size * profile.num_ranks),
        )
        for (name, choice), recompute, size in itertools.product(SETTINGS.items(), recomputes, sizes)
    }


def _micro_batches() -> tuple[int, ...]:
    return tuple(size for size in (1, 2, 4, 8) if GLOBAL_BATCH % (4 * size) == 0)


def budget_of(profile: Profile, settings: dict[str, Plan], steps: dict[str, list[float]], fraction: float) -> int:
    """A budget between the leanest plan's peak and that of the fastest setting."""
    try:
        make_plan(profile, budget_bytes=1 << 10, global_batch=GLOBAL_BATCH)
        raise SystemExit("a plan in one KiB: the budgets of this benchmark make no sense")
    except InfeasibleError as error:
        leanest_bytes = error.leanest_bytes
    fastest = min(steps, key=lambda label: statistics.median(steps[label]))
    highest_bytes = max(_device_bytes(profile, settings[fastest]), round(leanest_bytes * 1.2))
    # Room for the default too: without it there is nothing to compare with.
    default_bytes = min(_device_bytes(profile, plan) for label, plan in settings.items() if label.startswith(DEFAULT))
    return max(round(leanest_bytes + fraction * (highest_bytes - leanest_bytes)), default_bytes)


def _device_bytes(profile: Profile, plan: Plan) -> int:
    peak_bytes = simulate_bytes(profile, plan).peak_bytes
    return peak_bytes + sum(held_beside(profile, peak_bytes).values())


def _decisions(plan: Plan) -> str:
    """Names a plan by what it decides, so that the same decisions under another budget are not measured again."""
    return hashlib.sha256(repr(plan.decisions).encode()).hexdigest()[:12]


def report(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the table and returns the figures."""
    rows, over_best, over_default, over_bound, bound_by_link = [], [], [], [], []
    for case in cases:
        ours_s = statistics.median(case["ours"])
        best_s, default_s = statistics.median(case["best"]), statistics.median(case["default"])
        over_best.append(best_s / ours_s)
        over_default.append(default_s / ours_s)
        over_bound.append(ours_s / case["bound_s"])
        if default_s > 2 * case["bound_s"]:
            bound_by_link.append(over_default[-1])
        rows.append(
            (
                f"{case['family']}, {case['mbit']:g} Mbit/s, {format_bytes(case['budget_bytes'])}",
                f"{ours_s:.3f} ({min(case['ours']):.3f} to {max(case['ours']):.3f})",
                f"{case['ours_predicted_s']:.3f}",
                f"{best_s:.3f} {case['best_uniform']}",
                f"{over_best[-1]:.2f}",
                f"{over_default[-1]:.2f}",
                f"{over_bound[-1]:.2f}",
            )
        )
    header = ("scenario", "our step s", "predicted", "best uniform s", "over it", "over default", "of lower bound")
    print(format_table(header, rows))
    print(
        f"\n{len(cases)} scenarios: over the best uniform setting {min(over_best):.3f} at least and "
        f"{_geomean(over_best):.3f} in the geometric mean, over ZeRO-3 with full recomputation "
        f"{_geomean(over_default):.3f}, {_geomean(over_bound):.2f} times the lower bound"
    )
    print(machine())
    return {
        "num_scenarios": len(cases),
        "over_best_uniform_min": min(over_best),
        "over_best_uniform_geomean": _geomean(over_best),
        "over_default_geomean": _geomean(over_default),
        "over_default_where_links_bind_geomean": _geomean(bound_by_link) if bound_by_link else None,
        "step_over_lower_bound_geomean": _geomean(over_bound),
        "scenarios": cases,
    }


def _geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


# -- a slow node, a slow link


def _slow(flags: Any, kept: Path) -> dict[str, Any]:
    mbit = (flags.mbit or MBIT[:1])[0]
    found = {}
    # Four nodes: of two, nobody can tell whose link is slow.
    with TestBed(num_nodes=4, slots_per_node=1, link_mbit=mbit) as bed:
        share = len({core for part in bed.cores for core in part}) / bed.num_nodes
        inside_bed(__file__, f"slow equal {mbit:g}", bed, kept, is_quick=flags.quick, timeout_s=1800)
        for what in ("link", "cores"):
            if what == "link":
                bed.shape(mbit / 4, SLOW_NODE)
            else:
                bed.shape(mbit)
                bed.limit_cpus(SLOW_NODE, share / 2)
            inside_bed(__file__, f"slow {what} {mbit:g}", bed, kept, is_quick=flags.quick, timeout_s=1800)
            found[what] = read_json(kept)[f"slow {what} {mbit:g}"]
    rows = []
    for what, case in found.items():
        knew_s, did_not_s = statistics.median(case["knew"]), statistics.median(case["did_not"])
        case["knew_over_did_not"] = did_not_s / knew_s
        rows.append(
            (
                {"link": "a link at a quarter of the speed", "cores": "a node with half the cores"}[what],
                "; ".join(case["slow_nodes"]) or "-",
                "yes" if case["plan_changed"] else "no",
                f"{knew_s:.3f}",
                f"{did_not_s:.3f}",
                f"{case['knew_over_did_not']:.2f}",
            )
        )
    header = ("what is slow", "the profile names", "plan changed", "plan that knew, s", "that did not, s", "gain")
    print(format_table(header, rows))
    profile_s = max(case["profile_s"] for case in found.values())
    print(f"\na profile of the model on these four nodes took {profile_s:.1f} s at most")
    print(machine())
    return {"slow": found, "profile_seconds": profile_s}


def measure_slow(argument: str, path: Path, *, is_quick: bool) -> None:
    """Inside the bed: profiles it as it is; where it is unequal, trains the plans of both profiles."""
    what, _, speed = argument.partition(" ")
    kept, workload, cluster = Kept(path, is_fresh=False), families()["mixed"](), attach()
    key = f"slow {argument}"
    profile, profile_s = kept_profile(kept, f"{key} profile", workload, cluster)
    if what == "equal":
        return
    equal, _ = kept_profile(kept, f"slow equal {speed} profile", workload, cluster)
    settings = uniform_plans(equal, is_quick=True)
    peaks = {label: _device_bytes(equal, plan) for label, plan in settings.items()}
    budget_bytes = round((min(peaks.values()) + max(peaks.values())) / 2)
    plans = {
        name: make_plan(of, budget_bytes=budget_bytes, global_batch=GLOBAL_BATCH)
        for name, of in (("knew", profile), ("did_not", equal))
    }
    repeats = 3 if is_quick else 9
    with MeasuringGroup(cluster) as group:

        def measured(label: str, plan: Plan) -> list[float]:
            return kept.get(
                f"{key} {label}",
                lambda: list(try_plan(group, workload, plan, num_steps=repeats, limit_s=600.0).step_s),
            )

        found: dict[str, Any] = dict(in_turn(measured, plans, 1 if is_quick else 3))
    found["profile_s"] = profile_s
    found["slow_nodes"] = list(profile.slow_nodes())
    found["link_bytes_per_s"] = {
        of: [node.link_bytes_per_s for node in one.nodes] for of, one in (("equal", equal), ("now", profile))
    }
    found["plan_changed"] = plans["knew"].decisions != plans["did_not"].decisions
    found["predicted_s"] = {name: plan.prediction.step_s for name, plan in plans.items()}
    found["nodes"] = [dataclasses.asdict(node) for node in profile.nodes]
    kept.replace(key, found)


if __name__ == "__main__":
    main()
