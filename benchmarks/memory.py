"""How far predictions of a step's peak memory are from the truth: ours, and what else there is, on the same cases.

`python benchmarks/memory.py`: random cases of tests.memory_cases (models x plans x step options, 2 to 1024 ranks, one
seed). The truth is the allocator's: the executor's own second step as rank 0 of a fake world (tests.oracle). An error
is |predicted - truth| / truth; 'under' is the most that the truth lies above a prediction. Peers: memory_peers.py.
"""

import dataclasses
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# One thread: workspaces of CPU kernels grow with the threads, and a worker computes with one. Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import memory_peers
import torch
from harness import machine, parse_flags, write_figures

from osdp_ray.costs import simulate_bytes
from osdp_ray.errors import TraceError
from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes, format_seconds
from tests.memory_cases import MODELS, CaseDraw, MemoryCase, available_models, build_case, draw_cases
from tests.oracle import measure

SEED = 0
NUM_CASES = 220
NUM_QUICK_CASES = 6
QUICK_MODELS = ("gpt", "gpt2")
MAX_QUICK_RANKS = 16  # FSDP2 takes the longer to set a model up the more ranks there are
NUM_WORST = 12
MAX_PROCESSES = 8  # a case of a thousand ranks holds up to 1 GiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one method said of one case: None where it does not apply, or where it failed, as `problem` says."""

    predicted_bytes: int | None
    seconds: float
    problem: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One case with its truth and every method's outcome; 'ours' is one of the methods."""

    draw: CaseDraw
    truth_bytes: int
    truth_s: float
    outcomes: dict[str, Outcome]


def ours(case: MemoryCase) -> int:
    return simulate_bytes(case.profile, case.plan).peak_bytes


def weights_times_four(case: MemoryCase) -> int:
    return memory_peers.weights_times_four_bytes(case.profile, case.plan)


def deepspeed_states(case: MemoryCase) -> int:
    return memory_peers.deepspeed_bytes(case.profile, case.plan)


def megatron(case: MemoryCase) -> int | None:
    return _megatron(case, keeps_attention=True)


def megatron_fused_attention(case: MemoryCase) -> int | None:
    return _megatron(case, keeps_attention=False)


def _megatron(case: MemoryCase, *, keeps_attention: bool) -> int | None:
    sizes = memory_peers.transformer_sizes(case.workload)
    if sizes is None:
        return None
    activations = memory_peers.megatron_activation_bytes(sizes, case.plan, keeps_attention=keeps_attention)
    return None if activations is None else activations + memory_peers.deepspeed_bytes(case.profile, case.plan)


def torch_tracker(case: MemoryCase) -> int:
    return memory_peers.tracked_bytes(case.workload, case.plan)


METHODS: dict[str, Callable[[MemoryCase], int | None]] = {
    "ours": ours,
    "torch_fsdp_mem_tracker": torch_tracker,
    "megatron_activations": megatron,
    "megatron_fused_attention": megatron_fused_attention,
    "deepspeed_states": deepspeed_states,
    "weights_times_four": weights_times_four,
}


def main() -> None:
    flags = parse_flags(__doc__ or "")
    started = time.perf_counter()
    rows, untraced, trace_s = run_in_processes(choose_cases(quick=flags.quick))
    run_s = time.perf_counter() - started
    figures = summarise(rows)
    print(method_table(figures))
    print(f"\nours, by model\n{group_table(rows, lambda draw: draw.model)}")
    print(f"\nours, by precision\n{group_table(rows, lambda draw: draw.precision)}")
    print(f"\nours, by recomputation\n{group_table(rows, lambda draw: draw.recompute)}")
    plain = [row for row in rows if row.draw.is_plain]
    print(
        "\n".join(
            ["", *notes(rows, figures, untraced), *worst_cases(plain), "", "our largest errors", *worst_cases(rows)]
        )
    )
    print(
        f"\n{len(rows)} cases of seed {SEED} in {format_seconds(run_s)}; over all processes {format_seconds(trace_s)} "
        f"for traces, one per model and precision, and {format_seconds(sum(row.truth_s for row in rows))} for the truth"
    )
    print(machine())
    write_figures(flags.json, {**figures, "seed": SEED, "num_untraced": sum(untraced.values()), "trace_s": trace_s})


def choose_cases(*, quick: bool) -> tuple[CaseDraw, ...]:
    """The cases of a run; those of a quick one come from fewer models and smaller worlds."""
    if not quick:
        return draw_cases(NUM_CASES, SEED)
    models = [name for name in QUICK_MODELS if name in available_models()]
    draws = draw_cases(4 * NUM_QUICK_CASES, SEED, models=models)
    return tuple(draw for draw in draws if draw.num_ranks <= MAX_QUICK_RANKS)[:NUM_QUICK_CASES]


def run_in_processes(draws: Sequence[CaseDraw]) -> tuple[list[Row], dict[str, int], float]:
    """`run_cases` over all cores, one model after the other in each process, so that each is traced once."""
    models = dict.fromkeys(draw.model for draw in draws)
    groups = [[draw for draw in draws if draw.model == model] for model in models]
    rows, untraced, trace_s = [], {}, 0.0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, MAX_PROCESSES), context, _start_process) as pool:
        for some_rows, some_untraced, some_s in pool.map(run_cases, groups):
            rows += some_rows
            untraced |= some_untraced
            trace_s += some_s
            if sys.stderr.isatty():
                print(f"\r{len(rows)} of {len(draws)} cases", end="", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row.draw.index), untraced, trace_s


def _start_process() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # FSDP2 and transformers on what the models do


def run_cases(draws: Sequence[CaseDraw]) -> tuple[list[Row], dict[str, int], float]:
    """Every case by every method; how many were left out by the reason; seconds of all traces.

    A model that cannot be traced leaves its cases out, and the reason is reported with their number.
    """
    rows, untraced, trace_s = [], {}, 0.0
    for draw in draws:
        started = time.perf_counter()
        try:
            case = build_case(draw)
        except TraceError as error:
            reason = f"{draw.model} cannot be traced: {error}"
            untraced[reason] = untraced.get(reason, 0) + 1
            continue
        finally:
            trace_s += time.perf_counter() - started
        started = time.perf_counter()
        truth = measure(case.workload, case.plan)
        truth_s = time.perf_counter() - started
        if truth.left_bytes:
            raise RuntimeError(
                f"{draw.label}: the allocator's events are not complete, {truth.left_bytes} bytes are left"
            )
        outcomes = {name: ask(method, case) for name, method in METHODS.items()}
        rows.append(Row(draw=draw, truth_bytes=truth.peak_bytes, truth_s=truth_s, outcomes=outcomes))
    return rows, untraced, trace_s


def ask(method: Callable[[MemoryCase], int | None], case: MemoryCase) -> Outcome:
    """One method's prediction with its seconds; what the tracker raises is its outcome."""
    started = time.perf_counter()
    problem = ""
    try:
        predicted_bytes = method(case)
    except memory_peers.TRACKER_FAILURES as error:
        if method is not torch_tracker:
            raise
        predicted_bytes, problem = None, type(error).__name__
    return Outcome(predicted_bytes=predicted_bytes, seconds=time.perf_counter() - started, problem=problem)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The benchmark's figures: ours on top, the others under `peers`."""
    by_method = {name: method_figures(rows, name) for name in METHODS}
    plain = [row for row in rows if row.draw.is_plain]
    plain_errors = [abs(row.outcomes["ours"].predicted_bytes - row.truth_bytes) for row in plain]
    return {
        **by_method.pop("ours"),
        "num_plain_cases": len(plain),
        "num_plain_exact": plain_errors.count(0),
        "plain_error_max_bytes": max(plain_errors, default=None),
        "peers": by_method,
    }


def method_figures(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """One method's errors over the cases where it says something, and its seconds a case."""
    outcomes = [(row.outcomes[name], row.truth_bytes) for row in rows]
    said = [(outcome.predicted_bytes, truth) for outcome, truth in outcomes if outcome.predicted_bytes is not None]
    seconds = [outcome.seconds for outcome, _ in outcomes if outcome.predicted_bytes is not None]
    return {
        **error_figures(said),
        "num_failed": sum(bool(outcome.problem) for outcome, _ in outcomes),
        "seconds_median": statistics.median(seconds) if seconds else None,
    }


def error_figures(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Errors of (predicted, truth) in bytes; None where there are none. The 95th percentile is the nearest rank's."""
    errors = sorted(abs(predicted - truth) / truth for predicted, truth in pairs)
    if not errors:
        names = ("median", "p95", "max", "under_max")
        return {"num_cases": 0, **{f"error_{name}_fraction": None for name in names}}
    return {
        "num_cases": len(errors),
        "error_median_fraction": statistics.median(errors),
        "error_p95_fraction": errors[math.ceil(0.95 * len(errors)) - 1],
        "error_max_fraction": errors[-1],
        "error_under_max_fraction": max(0.0, *((truth - predicted) / truth for predicted, truth in pairs)),
    }


def method_table(figures: dict[str, Any]) -> str:
    header = ("predicted by", "cases", "failed", "median", "p95", "max", "most under", "a case")
    return format_table(header, [_cells(name, row) for name, row in (("ours", figures), *figures["peers"].items())])


def _cells(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    keys = ("median", "p95", "max", "under_max")
    seconds = figures["seconds_median"]
    return (
        name,
        str(figures["num_cases"]),
        str(figures["num_failed"]),
        *(_percent(figures[f"error_{key}_fraction"]) for key in keys),
        "-" if seconds is None else format_seconds(seconds),
    )


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction * 100:.3f} %"


def group_table(rows: Sequence[Row], group_of: Callable[[CaseDraw], str]) -> str:
    """Our errors by a property of the cases, the plain ones in bytes."""
    cells = []
    for group in dict.fromkeys(group_of(row.draw) for row in sorted(rows, key=lambda row: _order(row.draw))):
        members = [row for row in rows if group_of(row.draw) == group]
        figures, plain = method_figures(members, "ours"), [row for row in members if row.draw.is_plain]
        exact = sum(row.outcomes["ours"].predicted_bytes == row.truth_bytes for row in plain)
        cells.append((*_cells(group, figures)[:2], *_cells(group, figures)[3:7], f"{exact} of {len(plain)}"))
    return format_table(("", "cases", "median", "p95", "max", "most under", "plain exact"), cells)


def _order(draw: CaseDraw) -> tuple[int, str, str]:
    return tuple(MODELS).index(draw.model), draw.precision, draw.recompute


def notes(rows: Sequence[Row], figures: dict[str, Any], untraced: dict[str, int]) -> list[str]:
    """What was left out and why, and the plain cases."""
    plain_bytes, num_plain = figures["plain_error_max_bytes"], figures["num_plain_cases"]
    lines = []
    missing = [name for name in MODELS if name not in available_models()]
    if missing:
        lines.append(f"left out, for transformers is not installed: {', '.join(missing)}")
    lines += [f"left out, {number} cases: {reason}" for reason, number in untraced.items()]
    failures = [row.outcomes["torch_fsdp_mem_tracker"].problem for row in rows]
    for problem in sorted(set(failures) - {""}):
        lines.append(f"torch's tracker raised {problem} in {failures.count(problem)} cases")
    lines.append(
        f"plain cases (fp32, no accumulation, no clipping): {figures['num_plain_exact']} of {num_plain} to the byte, "
        f"at most {'-' if plain_bytes is None else format_bytes(plain_bytes)} off"
    )
    return lines


def worst_cases(rows: Sequence[Row]) -> list[str]:
    """Our largest errors, with what repeats them."""
    off = [(row.outcomes["ours"].predicted_bytes - row.truth_bytes, row) for row in rows]
    off.sort(key=lambda pair: -abs(pair[0]) / pair[1].truth_bytes)
    return [
        f"{num_bytes / row.truth_bytes * 100:+.3f} % ({num_bytes:+d} of {row.truth_bytes} B) {row.draw.label}"
        for num_bytes, row in off[:NUM_WORST]
        if num_bytes
    ]


if __name__ == "__main__":
    main()
