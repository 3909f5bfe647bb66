"""How far predictions for a GPU are from torch's caching allocator, and what a process takes on top of it.

`python benchmarks/gpu_memory.py` on a machine with a GPU, in under 4 minutes: one process plays rank 0 of worlds of 2
to 1024 ranks over a fake process group with real CUDA tensors, and the peak of the second step is compared with the
prediction for the device kind 'cuda' (every allocation rounded up to 512 bytes). Beside it: reserved against allocated
bytes, what the CUDA context takes and what NCCL takes in a world of one rank, the least that it can take.

Without a GPU it says so, writes that and ends well. It has not been run on a GPU yet: what is not CUDA's own runs on a
CPU in tests/unit/test_memory_benchmark.py.
"""

import dataclasses
import functools
import gc
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from harness import machine, parse_flags, write_figures
from memory import error_figures

from osdp_ray.costs import simulate_bytes
from osdp_ray.discovery import list_gpus
from osdp_ray.errors import TraceError
from osdp_ray.profiling.trace import Trace, trace
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Precision, Profile, Recompute
from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes
from osdp_ray.workload import Workload
from osdp_ray.workloads.gpt import GptWorkload
from tests.fake_rank import DeviceKind, StepPeak, measure_second_step
from tests.memory_cases import PRECISIONS, CaseDraw, build_case, draw_cases
from tests.oracle import traced_profile, uniform_plan

SEED = 1
NUM_CASES = 60
NUM_QUICK_CASES = 8
TIME_LIMIT_S = 150.0  # no case starts later; the slowest takes a few seconds
HEADROOM_FRACTION = 0.8  # of the free memory, for what fragmentation reserves beyond the peak
# A GPT of 130 M parameters, at which rounding and workspaces weigh little: ranks, plan, recomputation.
LARGE = {"layers": 8, "hidden": 1024, "heads": 16, "sequence": 512, "vocabulary": 16384}
LARGE_PLANS = ((8, "ZeRO-3", "none"), (8, "ZeRO-2", "none"), (64, "ZeRO-3", "full"), (8, "DP", "selective"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case: what was predicted for the device, and what its allocator counted."""

    label: str
    predicted_bytes: int
    predicted_persistent_bytes: int
    measured: StepPeak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A case before its model is touched: `build` traces it."""

    label: str
    build: Callable[[], tuple[Workload, Profile, Plan]]


def main() -> None:
    flags = parse_flags(__doc__ or "")
    warnings.filterwarnings("ignore")  # FSDP2 and transformers on what the models do
    if not torch.cuda.is_available():
        problem = "no GPU: torch sees no CUDA device here, so nothing was measured"
        print(problem)
        write_figures(flags.json, {"has_gpu": False, "problem": problem, "num_cases": 0})
        return
    overheads = measure_overheads()
    trials = choose_trials(NUM_QUICK_CASES if flags.quick else NUM_CASES)
    comparisons = compare_all(trials, "cuda", TIME_LIMIT_S)
    outside_bytes = _used_bytes() - overheads.pop("used_before_bytes") - torch.cuda.memory_reserved()
    figures = {
        "has_gpu": True,
        **summarise(comparisons),
        "num_left_out": len(trials) - len(comparisons),
        **overheads,
        "outside_allocator_bytes": outside_bytes,
    }
    print(comparison_table(comparisons))
    print(f"\n{figure_table(figures)}\n{torch.cuda.get_device_name()}; {machine()}")
    write_figures(flags.json, figures)


def choose_trials(num_random: int) -> list[Trial]:
    """Plans of a GPT that is no toy in both precisions, then random cases of every model."""
    trials = [
        Trial(
            label=f"gpt 8 x 1024 {precision}, {num_ranks} ranks, {choice}, recompute {recompute}",
            build=functools.partial(_build_large, precision, num_ranks, choice, recompute),
        )
        for precision in PRECISIONS
        for num_ranks, choice, recompute in LARGE_PLANS
    ]
    return trials + [
        Trial(label=draw.label, build=functools.partial(_build_random, draw)) for draw in draw_cases(num_random, SEED)
    ]


def _build_large(
    precision: Precision, num_ranks: int, choice: str, recompute: Recompute
) -> tuple[Workload, Profile, Plan]:
    workload, traced = _trace_large(precision)
    profile = traced_profile(workload, traced, ranks_per_node=(num_ranks,))
    return workload, profile, uniform_plan(profile, choice, recompute, micro_batch=8)


@functools.cache
def _trace_large(precision: Precision) -> tuple[Workload, Trace]:
    workload = GptWorkload(**LARGE)
    workload.precision = precision
    return workload, trace(workload)


def _build_random(draw: CaseDraw) -> tuple[Workload, Profile, Plan]:
    case = build_case(draw)
    return case.workload, case.profile, case.plan


def compare_all(trials: Sequence[Trial], device_kind: DeviceKind, limit_s: float) -> list[Comparison]:
    """One trial after the other until the time is up; what cannot be traced or would not fit is left out."""
    started, comparisons = time.perf_counter(), []
    for trial in trials:
        if time.perf_counter() - started > limit_s:
            break
        try:
            comparison = compare(trial, device_kind)
        except TraceError as error:
            print(f"left out, {trial.label}: {error}")
            continue
        if comparison is not None:
            comparisons.append(comparison)
    return comparisons


def compare(trial: Trial, device_kind: DeviceKind) -> Comparison | None:
    """Prediction and measurement of one trial, None where the device has too little memory for it."""
    workload, profile, plan = trial.build()
    predicted = simulate_bytes(dataclasses.replace(profile, device_kind=device_kind), plan)
    if device_kind == "cuda":
        gc.collect()  # the last trial's model
        torch.cuda.empty_cache()  # what is reserved then belongs to this trial
        if predicted.peak_bytes > HEADROOM_FRACTION * torch.cuda.mem_get_info()[0]:
            return None
    return Comparison(
        label=trial.label,
        predicted_bytes=predicted.peak_bytes,
        predicted_persistent_bytes=predicted.persistent_bytes,
        measured=measure_second_step(workload, plan, device_kind),
    )


def summarise(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Errors of the predicted peak, bytes that what stays between steps is off by, reserved over allocated bytes."""
    measured = [comparison.measured for comparison in comparisons]
    reserved = [m.reserved_bytes / (m.peak_bytes + m.other_bytes) for m in measured if m.reserved_bytes is not None]
    off = [abs(c.predicted_persistent_bytes - c.measured.persistent_bytes) for c in comparisons]
    return {
        **error_figures([(c.predicted_bytes, c.measured.peak_bytes) for c in comparisons]),
        "persistent_error_max_bytes": max(off, default=None),
        "reserved_over_allocated_median": statistics.median(reserved) if reserved else None,
        "reserved_over_allocated_max": max(reserved, default=None),
        "other_max_bytes": max((m.other_bytes for m in measured), default=None),
    }


def measure_overheads() -> dict[str, int]:
    """Bytes of the device before CUDA is touched, then of its context, then of NCCL for a world of one rank.

    NVML counts before there is a context. More ranks take more of NCCL's buffers, one per channel and peer, and NCCL
    refuses two ranks on one device: what it takes here is the least.
    """
    used_before_bytes = _used_bytes()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    context_bytes = _used_bytes() - used_before_bytes - torch.cuda.memory_reserved()
    free_bytes = torch.cuda.mem_get_info()[0]
    store = dist.HashStore()
    dist.init_process_group("nccl", rank=0, world_size=1, store=store, device_id=torch.device("cuda", 0))
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    nccl_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    dist.destroy_process_group()
    return {"used_before_bytes": used_before_bytes, "context_bytes": context_bytes, "nccl_bytes": nccl_bytes}


def _used_bytes() -> int:
    """Bytes in use on the first visible GPU, by whatever process."""
    (device,) = list_gpus("local", platform.node(), 1)
    return device.memory_bytes - device.free_bytes


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    rows = [
        (
            f"{(c.predicted_bytes / c.measured.peak_bytes - 1) * 100:+.3f} %",
            format_bytes(c.measured.peak_bytes),
            format_bytes(c.measured.other_bytes),
            "-" if c.measured.reserved_bytes is None else format_bytes(c.measured.reserved_bytes),
            c.label,
        )
        for c in comparisons
    ]
    return format_table(("predicted", "peak", "other", "reserved", "case"), rows)


def figure_table(figures: dict[str, Any]) -> str:
    """The figures by name, bytes and fractions written out."""
    rows = []
    for name, value in figures.items():
        if value is None:
            text = "-"
        elif name.endswith("_bytes"):
            text = format_bytes(value)
        elif name.endswith("_fraction"):
            text = f"{value * 100:.3f} %"
        else:
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
        rows.append((name, text))
    return format_table(("figure", "value"), rows)


if __name__ == "__main__":
    main()
