"""The planner: how fast it is, what its plans gain by their prediction, and other ways to solve the same choice.

`python benchmarks/planner.py`: seconds for 96 layers x 7 operators and for 1000 layers on 1024 ranks, trace included;
plans of three model families on the catalogue's clusters under several budgets, against the best uniform setting and
against ZeRO-3 with full recomputation; the peers of `planner_peers`; OSDP's own published profile; small instances
against enumeration. Seconds are those of CPU: every plan is made on one core, and those of the tables on all at once.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

from harness import machine, parse_flags, write_figures
from planner_peers import PEERS, Task, Way, counts, cpu_s, task_of, timed
from planner_peers import Group as PeerGroup

from osdp_ray.catalogue import catalogue_names, load_hardware
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning import plan
from osdp_ray.planning import program as planning_program
from osdp_ray.profiling import estimate
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.schema import format_table
from osdp_ray.units import GIB, MIB
from osdp_ray.workloads.families import FAMILIES, FamilyWorkload
from osdp_ray.workloads.gpt import GptWorkload

ROOT = Path(__file__).resolve().parent
NUM_ENUMERATED = {"whole": 300, "split": 60}
DEPTHS = (12, 48, 96, 192, 1000)
GLOBAL_BATCH_PER_RANK = 32
BUDGET_FRACTIONS = (0.15, 0.25, 0.4, 0.6, 0.8, 1.0)  # of a device's memory


def main() -> None:
    flags = parse_flags(__doc__ or "")
    sys.path.insert(0, str(ROOT.parent))
    estimate(FamilyWorkload(FAMILIES["narrow"][:1], sequence=8), load_hardware("8x-a100-nvlink"))  # imports aside
    figures = speed(flags.quick)
    figures |= gains(flags.quick)
    figures |= peers(flags.quick)
    figures |= published()
    figures |= exactness(flags.quick)
    print(machine())
    write_figures(flags.json, figures)


# -- speed


def speed(quick: bool) -> dict[str, Any]:
    """Seconds with the trace, and of every solve of the integer program."""
    solves: list[float] = []
    run = planning_program.run_solver

    def timed_solver(*arguments: Any, **words: Any) -> Any:
        started = cpu_s()
        outcome = run(*arguments, **words)
        if words["is_integer"]:
            solves.append(cpu_s() - started)
        return outcome

    planning_program.run_solver = timed_solver
    rows, figures = [], {}
    for name, layers, cluster in (("96", 96, "8x-a100-nvlink"), ("1000", 1000, "1024x-h100-infiniband")):
        workload = GptWorkload(layers=layers, hidden=2048, heads=16, sequence=1024)
        workload.precision = "bf16"
        started = cpu_s()
        profile = estimate(workload, load_hardware(cluster))
        traced_s = cpu_s() - started
        solves.clear()
        planned = []
        for _ in range(1 if quick else 3):
            again = Profile.from_json(profile.to_json())
            started = cpu_s()
            made = plan(again, budget_bytes=40 * GIB, global_batch=GLOBAL_BATCH_PER_RANK * profile.num_ranks)
            planned.append(cpu_s() - started)
        figures[f"seconds_{name}_layers"] = traced_s + statistics.median(planned)
        figures[f"seconds_plan_{name}_layers"] = statistics.median(planned)
        figures[f"seconds_per_solve_{name}_layers"] = statistics.median(solves) if solves else 0.0
        rows.append(
            (
                f"{layers} layers, {profile.num_ranks} ranks",
                f"{traced_s:.2f}",
                f"{statistics.median(planned):.2f}",
                f"{statistics.median(solves) * 1e3:.0f} ms" if solves else "-",
                f"{max(solves) * 1e3:.0f} ms" if solves else "-",
                f"{made.solver.status}, gap {made.solver.gap_fraction * 100:.3f} %",
            )
        )
    planning_program.run_solver = run
    print(
        format_table(("model", "trace, s of CPU", "plan, s of CPU", "a solve, median", "longest", "proven"), rows), "\n"
    )
    return figures


# -- gains


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """One plan beside the settings that it is compared with, whose samples per second are 0 where none fits."""

    family: str
    cluster: str
    fraction: float
    samples_per_s: float
    best_uniform: float
    full_recompute: float
    gap_fraction: float
    seconds: float


def gains(quick: bool) -> dict[str, Any]:
    """What plans gain by their own prediction over uniform settings, on families x clusters x budgets."""
    clusters = catalogue_names() if not quick else ("16x-a100-100gbit",)
    fractions = BUDGET_FRACTIONS if not quick else (0.25, 0.6)
    found: list[Gain | None] = []
    with pool_of_cores() as pool:
        cases = [(name, cluster, fractions) for name in list(FAMILIES)[: 1 if quick else None] for cluster in clusters]
        for (name, cluster, _), made in zip(cases, pool.map(gains_of, *zip(*cases, strict=True)), strict=True):
            found += made
            print(f"{name} on {cluster}: {sum(gain.seconds for gain in made if gain):.0f} s of CPU", file=sys.stderr)
    plans = [gain for gain in found if gain is not None]
    rows = [
        (
            gain.family,
            gain.cluster,
            f"{gain.fraction:.2f}",
            f"{gain.samples_per_s:.1f}",
            f"{gain.samples_per_s / gain.best_uniform:.3f}" if gain.best_uniform else "none fits",
            f"{gain.samples_per_s / gain.full_recompute:.3f}" if gain.full_recompute else "does not fit",
            f"{gain.gap_fraction * 100:.2f} %",
            f"{gain.seconds:.1f}",
        )
        for gain in plans
    ]
    header = ("family", "cluster", "budget", "samples/s", "over best uniform", "over ZeRO-3 + full", "gap", "plan s")
    print(format_table(header, rows))
    over_best = [gain.samples_per_s / gain.best_uniform for gain in plans if gain.best_uniform]
    over_full = [gain.samples_per_s / gain.full_recompute for gain in plans if gain.full_recompute]
    for words, ratios in (("best uniform setting", over_best), ("ZeRO-3 with full recompute", over_full)):
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"over the {words}: geometric mean {geomean(ratios):.3f}, least {min(ratios):.3f}, quartiles {low:.3f} "
            f"{middle:.3f} {high:.3f}, most {max(ratios):.3f}, of {len(ratios)}"
        )
    gaps, seconds = [gain.gap_fraction for gain in plans], [gain.seconds for gain in plans]
    print(f"{found.count(None)} do not fit at all; gaps: median {statistics.median(gaps):.4f}, most {max(gaps):.4f}")
    print(f"seconds of CPU for a plan: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}\n")
    return {
        "num_plans": len(plans),
        "over_best_uniform_min": min(over_best),
        "over_best_uniform_geomean": geomean(over_best),
        "over_best_uniform_max": max(over_best),
        "over_full_recompute_geomean": geomean(over_full),
        "gap_median_fraction": statistics.median(gaps),
        "gap_max_fraction": max(gaps),
        "seconds_per_plan_median": statistics.median(seconds),
        "seconds_per_plan_max": max(seconds),
    }


def gains_of(name: str, cluster: str, fractions: tuple[float, ...]) -> list[Gain | None]:
    """The plans of one model on one cluster, None where nothing fits."""
    warnings.simplefilter("ignore", DeprecationWarning)
    workload, hardware, found = FamilyWorkload(FAMILIES[name]), load_hardware(cluster), []
    has_bf16 = all("bf16" in device.peak_flops_per_s for device in hardware.devices)
    workload.precision = "bf16" if has_bf16 else "fp32"
    profile = estimate(workload, hardware)
    for fraction in fractions:
        started, budget_bytes = cpu_s(), round(fraction * profile.device_memory_bytes)
        try:
            made = plan(profile, budget_bytes=budget_bytes, global_batch=GLOBAL_BATCH_PER_RANK * profile.num_ranks)
        except InfeasibleError:
            found.append(None)
            continue
        found.append(
            Gain(
                family=name,
                cluster=cluster,
                fraction=fraction,
                samples_per_s=made.prediction.samples_per_s,
                best_uniform=best_uniform(made),
                full_recompute=full_recompute(made),
                gap_fraction=made.solver.gap_fraction,
                seconds=cpu_s() - started,
            )
        )
    return found


def pool_of_cores() -> concurrent.futures.ProcessPoolExecutor:
    """A process per core, new ones: torch's autograd hangs in a fork of a process that has used it."""
    return concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))


def best_uniform(made: Plan) -> float:
    return max((other.samples_per_s or 0.0 for other in made.alternatives), default=0.0)


def full_recompute(made: Plan) -> float:
    return next((o.samples_per_s or 0.0 for o in made.alternatives if o.name == "ZeRO-3 + full recompute"), 0.0)


def geomean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


# -- peers


def peers(quick: bool) -> dict[str, Any]:
    """Seconds and objective of every peer by depth, with HiGHS and with CBC where it runs a program."""
    rows, found = [], {}
    for depth in DEPTHS[:1] if quick else DEPTHS:
        workload = GptWorkload(layers=depth, hidden=1024, heads=16, sequence=512)
        task = task_of(estimate(workload, load_hardware("8x-titan-rtx-pcie3")), 4, 0.37)
        _, ours = timed(counts, task)
        for name, solve in PEERS.items():
            for solver in ("HiGHS", "CBC") if "search" not in name and "dynamic" not in name else ("",):
                if depth == DEPTHS[-1] and name != "counts (ours)":
                    continue  # minutes
                os.environ["OSDP_SOLVER"] = solver
                taken_s, value = timed(solve, task)
                label = f"{name}, {solver}" if solver else name
                ratio = value / ours if value and ours else None
                rows.append((str(depth), label, f"{taken_s:.3f}", f"{ratio:.6f}" if ratio else "none in its limits"))
                if depth == 96:
                    found[label] = {"seconds": taken_s, "objective_ratio": ratio}
    os.environ["OSDP_SOLVER"] = ""
    print(format_table(("layers", "way to choose", "seconds", "objective / ours"), rows), "\n")
    return {"peers": found}


# -- OSDP's published profile


def published() -> dict[str, Any]:
    """OSDP's own table: which throughput its search picks (least seconds over its batches), and the best that is."""
    table = json.loads((ROOT / "data" / "osdp_published_profile.json").read_text())
    rows, ratios = [], []
    for limit_mb in (8192, 16384):
        for hidden, times, sizes in zip(table["hidden_sizes"], table["time_s"], table["memory_mb"], strict=True):
            for layers in (24, 48, 96):
                answers = {}
                for batch in (1, 2, 3):
                    ways = tuple(Way(s, round(mb * MIB)) for s, mb in zip(times[batch], sizes[batch], strict=True))
                    capacity = (limit_mb - table["extra_overhead_mb"]) * MIB
                    seconds = counts(Task((PeerGroup(layers, ways),), capacity))
                    if seconds is not None:
                        answers[batch] = seconds
                if not answers:
                    continue
                theirs = min(answers, key=lambda batch: answers[batch])
                best = max(answers, key=lambda batch: batch / answers[batch])
                ratio = (best / answers[best]) / (theirs / answers[theirs])
                ratios.append(ratio)
                rows.append((f"{limit_mb} MB", str(hidden), str(layers), str(theirs), str(best), f"{ratio:.2f}"))
    print("OSDP's published profile: the batch of least seconds (its scheduler's rule) and of most samples per second")
    print(format_table(("limit", "hidden", "layers", "its batch", "ours", "throughput, ours / its"), rows[:12]))
    print(f"of {len(ratios)}: geometric mean {geomean(ratios):.2f}, most {max(ratios):.2f}\n")
    return {"published_over_its_choice_geomean": geomean(ratios), "published_num": len(ratios)}


# -- exactness


def exactness(quick: bool) -> dict[str, Any]:
    """Random instances, whole and with operators that may be split, against enumeration."""
    figures: dict[str, Any] = {}
    for kind, num in NUM_ENUMERATED.items():
        seeds = range(num // 30 if quick else num)
        with pool_of_cores() as pool:
            outcomes = list(pool.map(outcome_of, itertools.repeat(kind), seeds, chunksize=4))
        missed, unproven = (sum(column) for column in zip(*outcomes, strict=True))
        print(f"{len(seeds)} enumerable instances, {kind}: {missed} missed, {unproven} not proven")
        figures |= {f"num_{kind}": len(seeds), f"num_{kind}_missed": missed, f"num_{kind}_unproven": unproven}
    print()
    return figures


def outcome_of(kind: str, seed: int) -> tuple[bool, bool]:
    """Whether a faster plan than ours was missed, and whether ours was not proven."""
    from tests.enumeration import faster_plan_that_fits, random_instance, random_split_instance

    warnings.simplefilter("ignore", DeprecationWarning)
    instance = {"whole": random_instance, "split": random_split_instance}[kind](seed)
    made = plan(instance.profile, **instance.wishes)
    missed = faster_plan_that_fits(instance, made.prediction.step_s) is not None
    return missed, made.solver.status != "optimal"


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    main()
