"""Seconds of every section class's forward and backward, measured on a worker's own device.

The model runs for real with the first three blocks of each class; the others pass their input through, so the time
and the memory are those of a shallow model. Hooks stand where the trace's stand.
"""

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from osdp_ray.modeling import user_code
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.modeling.recompute import recompute_block
from osdp_ray.modeling.structure import Structure, find_blocks
from osdp_ray.modeling.stubs import block_rows, stand_ins, stubbed
from osdp_ray.profiling.recorder import BACKWARD, attach_hooks
from osdp_ray.records.profile import ENTER, EXIT, POST_BACKWARD, PRE_BACKWARD, ComputeCost, Recompute
from osdp_ray.workload import Workload

_REPEATS, _LEAST_REPEATS = 9, 3
_LEAST_BATCHES = 2  # a line needs two points
_Points = list[tuple[int, float]]  # micro-batch, seconds
_Run = list[tuple[float, float]]  # (forward, backward) seconds by class


class _Stopwatch:
    """Takes the time of every mark, in the place of a Recorder."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.order: list[str] = []
        self.times: dict[tuple[int, str], float] = {}

    def mark(self, code: int, subject: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if code in (ENTER, PRE_BACKWARD):
            self.times.setdefault((code, subject), time.perf_counter())
        else:
            self.times[(code, subject)] = time.perf_counter()


def measure_compute(
    workload: Workload, structure: Structure, micro_batches: tuple[int, ...], device_type: str, limit_s: float
) -> list[ComputeCost]:
    """One ComputeCost per class, fitted over the micro-batches; all ranks of the default group measure side by side.

    They start every batch together and agree on what the time allows (about `limit_s`), so that what ranks of a node
    share is shared here as it is in training. The first two micro-batches are always measured.
    """
    device = torch.device(device_type)
    model, initialisation = build_on_meta(workload)
    blocks = find_blocks(model, user_code.blocks(workload))
    rows: dict[Recompute, dict[int, list[_Run]]] = {"none": {}, "selective": {}, "full": {}}
    with stubbed(model, blocks, stand_ins(block_rows(model, blocks))) as stubs:
        initialisation.materialize(model, device, 0, skip=stubs)
        real = [name for name in blocks if name not in stubs]
        started = time.perf_counter()
        for position, micro_batch in enumerate(micro_batches):
            left_s = limit_s - _agreed(time.perf_counter() - started)
            if position >= _LEAST_BATCHES and left_s <= 0:
                break
            batch = next(user_code.batches(workload, 0, 1, micro_batch, 0, 0))
            batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
            share_s = left_s / (len(micro_batches) - position) / len(rows)
            for recompute, found in rows.items():
                with _recomputed(model, real, recompute):
                    once = functools.partial(_run_once, workload, model, structure, blocks, stubs, batch, device)
                    found[micro_batch] = _repeated(once, share_s)
    gc.collect()
    medians = {
        recompute: {micro_batch: _median_run(structure, runs) for micro_batch, runs in found.items()}
        for recompute, found in rows.items()
    }
    return [_fit(class_index, medians) for class_index in range(len(structure.classes))]


def _repeated(once: Callable[[], _Run], share_s: float) -> list[_Run]:
    """A run that warms up, and as many more as fit into the share of time, three to nine."""
    _together()
    began_s = time.perf_counter()
    once()
    warm_s = _agreed(time.perf_counter() - began_s)
    repeats = max(_LEAST_REPEATS, min(_REPEATS, int(share_s / max(warm_s, 1e-6)) - 1))
    runs = []
    for _ in range(repeats):
        _together()
        runs.append(once())
    return runs


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _agreed(seconds: float) -> float:
    """The largest of all ranks."""
    if not dist.is_initialized():
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    agreed = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return float(agreed)


def _run_once(
    workload: Workload,
    model: nn.Module,
    structure: Structure,
    blocks: tuple[str, ...],
    stubs: frozenset[str],
    batch: Any,
    device: torch.device,
) -> _Run:
    """(forward, backward) seconds of every class in one run."""
    watch = _Stopwatch(device)
    real = [name for name in blocks if name not in stubs]
    handles = [handle for name in real for handle in attach_hooks(watch, name, model.get_submodule(name))]
    model.zero_grad(set_to_none=True)
    watch.mark(ENTER, "")
    loss = user_code.loss(workload, model, batch)
    watch.mark(BACKWARD, "")
    user_code.backward(loss)
    watch.mark(EXIT, "")
    for handle in handles:
        handle.remove()
    return _by_class(watch.times, structure, real)


def _by_class(times: dict[tuple[int, str], float], structure: Structure, real: list[str]) -> _Run:
    """A block's seconds are the mean of its class: where ranks take turns on a core, most blocks run through and one
    waits for all, and a median would leave the waiting out."""
    start, turn, end = times[(ENTER, "")], times[(BACKWARD, "")], times[(EXIT, "")]
    order = sorted((name for name in real if (ENTER, name) in times), key=lambda name: times[(ENTER, name)])
    results = []
    for class_index, section_class in enumerate(structure.classes):
        if section_class.is_block:
            members = [name for name in structure.members(class_index) if name in order]
            spans = [
                (
                    times[(EXIT, name)] - times[(ENTER, name)],
                    times.get((POST_BACKWARD, name), end) - times.get((PRE_BACKWARD, name), end),
                )
                for name in members
            ]
            results.append((statistics.fmean(s[0] for s in spans), statistics.fmean(s[1] for s in spans)))
        elif section_class.name == "stem":
            first = times[(ENTER, order[0])] if order else start
            after = times.get((POST_BACKWARD, order[0]), end) if order else end
            results.append((first - start, end - after))
        else:
            last = times[(EXIT, order[-1])] if order else start
            before = times.get((PRE_BACKWARD, order[-1]), end) if order else end
            results.append((turn - last, before - turn))
    return results


def _median_run(structure: Structure, runs: list[_Run]) -> _Run:
    """The medians of every class, stretched so that the whole model takes the median of what it took.

    Where something is now and then in the way of one class or another, it is in none of their medians.
    """

    def whole_s(run: _Run) -> float:
        return sum(sum(run[section.class_index]) for section in structure.sections)

    found = [
        (statistics.median(forward_s for forward_s, _ in of_class), statistics.median(back_s for _, back_s in of_class))
        for of_class in zip(*runs, strict=True)
    ]
    factor = statistics.median(map(whole_s, runs)) / max(whole_s(found), 1e-12)
    return [(forward_s * factor, backward_s * factor) for forward_s, backward_s in found]


def _fit(class_index: int, rows: dict[Recompute, dict[int, _Run]]) -> ComputeCost:
    """What a class takes as a line in the micro-batch, neither part below zero."""

    def points(recompute: Recompute, direction: int) -> _Points:
        return [(micro_batch, run[class_index][direction]) for micro_batch, run in rows[recompute].items()]

    def both_s(recompute: Recompute) -> _Points:
        return [(size, sum(run[class_index])) for size, run in rows[recompute].items()]

    # Of both passes: what is to recompute costs something in forward, too.
    more = {
        recompute: [
            (micro_batch, max(0.0, seconds - plain_s))
            for (micro_batch, seconds), (_, plain_s) in zip(both_s(recompute), both_s("none"), strict=True)
        ]
        for recompute in ("selective", "full")
    }
    cost = fit_cost(class_index, points("none", 0), points("none", 1), more["selective"])
    full_constant_s, full_slope_s = fit_line(more["full"])
    return dataclasses.replace(cost, full_constant_s=full_constant_s, full_s_per_sample=full_slope_s)


def fit_cost(class_index: int, forward: _Points, backward: _Points, selective: _Points) -> ComputeCost:
    """A class's seconds as lines in the micro-batch; `selective` is what recomputing a part adds to backward."""
    forward_constant, forward_slope = fit_line(forward)
    backward_constant, backward_slope = fit_line(backward)
    selective_constant, selective_slope = fit_line(selective)
    return ComputeCost(
        class_index=class_index,
        forward_constant_s=forward_constant,
        forward_s_per_sample=forward_slope,
        backward_constant_s=backward_constant,
        backward_s_per_sample=backward_slope,
        selective_constant_s=selective_constant,
        selective_s_per_sample=selective_slope,
    )


@contextlib.contextmanager
def _recomputed(model: nn.Module, names: list[str], recompute: Recompute) -> Iterator[None]:
    """Within the context the named blocks recompute."""
    blocks = [model.get_submodule(name) for name in names] if recompute != "none" else []
    for block in blocks:
        recompute_block(block, recompute)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def fit_line(points: _Points) -> tuple[float, float]:
    """`constant + slope * x`, both at least zero, with the least squares of the errors relative to x: a small batch
    must be as right, in parts of itself, as a large one."""
    if len(points) == 1:
        return 0.0, max(0.0, points[0][1]) / points[0][0]
    weights = [1 / (x * x) for x, _ in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / sum(
        w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True)
    )
    constant = mean_y - slope * mean_x
    if slope < 0:
        return max(0.0, mean_y), 0.0
    if constant < 0:
        return 0.0, statistics.fmean(y / x for x, y in points)
    return constant, slope
