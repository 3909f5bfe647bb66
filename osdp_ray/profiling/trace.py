"""Model -> bytes: one forward and backward under fake tensors, cut into sections, affine in the micro-batch.

In goes a workload; out come its Structure and a SectionTrace per section class and way to recompute. Only three blocks
of a row of equal ones run, the rest pass through (modeling.stubs); two runs with different micro-batches give every
size as `constant + per_sample * micro_batch`. Nothing of the model's size is allocated.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from osdp_ray.errors import TraceError, WorkloadError
from osdp_ray.modeling import user_code
from osdp_ray.modeling.materialize import build_bare, build_with_scratch
from osdp_ray.modeling.splitting import watch_weights
from osdp_ray.modeling.structure import (
    Structure,
    build_structure,
    find_blocks,
    kinds_of,
    with_scratch,
)
from osdp_ray.modeling.stubs import block_rows, stand_ins, stubbed
from osdp_ray.profiling.recorder import Recorder
from osdp_ray.profiling.scratch import Kernels
from osdp_ray.profiling.sections import (
    Run,
    cut_sections,
    find_variants,
    first_of_each,
    join_runs,
    of_one_sample,
    without_unreached,
)
from osdp_ray.profiling.subject import Subject
from osdp_ray.profiling.work import Counter, SectionWork, cut_work
from osdp_ray.records.profile import Recompute, SectionTrace
from osdp_ray.records.scratch import KernelScratch
from osdp_ray.workload import Workload

_MICRO_BATCHES = (2, 3)
_SPARES: tuple[Recompute, ...] = ("selective", "full")
_LONG_ROW = 5  # blocks of a row: two and the last one that do not recompute, one each that recomputes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a trace found: see SectionTrace for `traces`; `buffer_bytes` are the model's own buffers.

    `evaluation` are forward passes without gradients. `work` holds what `traces` has a trace of, where work was
    counted. `scratch` is what `traces` and the others refer to by number, on this machine's CPU.
    """

    structure: Structure
    traces: tuple[SectionTrace, ...]
    evaluation: tuple[SectionTrace, ...]
    batch_bytes_per_sample: int
    buffer_bytes: int
    buffer_scratch_bytes: int = 0
    alone: tuple[SectionTrace, ...] = ()
    alone_evaluation: tuple[SectionTrace, ...] = ()
    work: tuple[SectionWork, ...] = ()
    scratch: tuple[KernelScratch, ...] = ()


def trace(workload: Workload, *, counts_work: bool = False, measures_scratch: bool = True) -> Trace:
    """Traces a workload's model; needs neither a device nor the model's memory. Raises TraceError naming the module,
    and WorkloadError where the user's own code is wrong.

    Where the workload is to be measured, real tensors run instead, on this machine's CPU: of every row of equal blocks
    the few that run are held whole, and sizes that depend on values are the highest seen.
    With `counts_work` the floating-point operations and the bytes of every operation are counted, too. Kernels of
    16-bit floats whose scratch no formula tells run once each (see profiling.scratch), unless `measures_scratch` is
    off, which is for GPUs: theirs is none of a CPU's.
    """
    model, scratch_bytes = build_with_scratch(workload)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise TraceError(
                name, "it is a parameter without a dimension, which FSDP2 cannot shard", "Make it [1] long"
            )
        if parameter.numel() == 0:
            problem = f"it is a parameter of shape {tuple(parameter.shape)}, without an element to train or to shard"
            raise TraceError(name, problem, "Leave it out of the model, or make no dimension of it 0")
    blocks = find_blocks(model, user_code.blocks(workload))
    batches = [_first_batch(workload, micro_batch) for micro_batch in (*_MICRO_BATCHES, 1)]
    buffer_scratch_bytes = max((scratch_bytes.get(name, 0) for name, _ in model.named_buffers()), default=0)
    buffer_bytes = sum({id(buffer): buffer.nbytes for buffer in model.buffers()}.values())
    try:
        structure, found = _trace_model(workload, model, blocks, batches, counts_work)
    except _RunsTwice:
        structure, found = _trace_model(workload, build_bare(workload), (), batches, counts_work)
    structure = with_scratch(structure, scratch_bytes)
    traces = found.traces(structure)
    return Trace(
        # Of a model whose values decide what runs, another batch may reach what this one did not.
        structure=structure if workload.measure else without_unreached(structure, traces),
        traces=traces,
        evaluation=found.evaluation(structure),
        alone=found.alone(structure),
        alone_evaluation=found.alone_evaluation(structure),
        batch_bytes_per_sample=_bytes_per_sample(batches[:2]),
        buffer_bytes=buffer_bytes,
        buffer_scratch_bytes=buffer_scratch_bytes,
        work=found.work(structure),
        scratch=found.kernels.measure() if measures_scratch else (),
    )


class _RunsTwice(Exception):
    """A block runs more than once in one forward, so that it is no stretch of the model's time."""


def _trace_model(
    workload: Workload, model: nn.Module, blocks: tuple[str, ...], batches: list[Any], counts_work: bool
) -> tuple[Structure, "_Found"]:
    """Structure and runs with these blocks; an empty tuple makes the whole model one section.

    Where every row has blocks to spare, one of them recomputes all and one a part, beside those that do not, and one
    run tells all. Else, or where the blocks of a row turn out to differ, all recompute in runs of their own.
    """
    kinds = kinds_of(model, blocks)
    rows = block_rows(model, blocks, kinds)
    spares: dict[str, Recompute] = {}
    if all(len(row) >= _LONG_ROW for row in rows):
        spares = {name: recompute for row in rows for name, recompute in zip(row[2:4], _SPARES, strict=True)}
    stands_for = stand_ins(rows)
    found = _Found(batches, counts_work, workload.measure)
    real = {*stands_for, *spares}
    with stubbed(model, blocks, real, kinds) as stubs, Subject(workload, model, blocks, stubs) as subject:
        order = found.record(subject, spares)
        found.record_evaluation(subject)
    entries = collections.Counter(order)
    if any(entries[name] > 1 for name in blocks):
        raise _RunsTwice
    draft = build_structure(model, blocks, order, None, kinds)  # out of the context, with the parameters' own types
    variants = find_variants(draft, found.runs, stands_for)
    if blocks and not (spares and len(set(variants.values())) == len(draft.classes) - 2):
        with stubbed(model, blocks, stands_for, kinds) as stubs, Subject(workload, model, blocks, stubs) as subject:
            for recompute in _SPARES:
                found.record(subject, dict.fromkeys(stands_for, recompute))
        variants = find_variants(draft, found.runs, stands_for)
    return build_structure(model, blocks, order, variants, kinds, found.read), found


class _Found:
    """What was recorded, run by run: at two micro-batches, and at the last of `batches`, which has one sample."""

    def __init__(self, batches: list[Any], counts_work: bool, is_sampled: bool) -> None:
        self.batches, self.counts_work, self.is_sampled = batches[:-1], counts_work, is_sampled
        self.kernels = Kernels(_MICRO_BATCHES)
        self.single: Any = batches[-1]  # None where the model does not run it, such as batch norm
        self.single_runs: list[Run] = []
        self.single_evaluations: list[Run] = []
        self.runs: list[Run] = []
        self.evaluations: list[Run] = []
        self.counters: list[list[Counter]] = []
        self.read: set[str] = set()  # operators whose weights others read

    def record(self, subject: "Subject", recomputes: Mapping[str, Recompute]) -> list[str]:
        """Records a run at every micro-batch; returns the modules in the order in which they were entered."""
        counters = [Counter() for _ in self.batches]
        watches = counters if self.counts_work else [None] * len(self.batches)
        recorders = [subject.record(recomputes, *pair) for pair in zip(self.batches, watches, strict=True)]
        self.runs.append(self._join(recomputes, recorders))
        self.counters.append(counters)
        self.single_runs += self._single_run(subject, recomputes)
        return recorders[0].order

    def record_evaluation(self, subject: "Subject") -> None:
        """Records a forward without gradients at every micro-batch."""
        with watch_weights(subject.modules) as self.read:
            recorders = [subject.record({}, batch, evaluates=True) for batch in self.batches]
            self.single_evaluations += self._single_run(subject, {}, evaluates=True)
        self.evaluations.append(self._join({}, recorders))

    def _single_run(
        self, subject: "Subject", recomputes: Mapping[str, Recompute], *, evaluates: bool = False
    ) -> list[Run]:
        if self.single is None:
            return []
        try:
            recorder = subject.record(recomputes, self.single, evaluates=evaluates)
        except (WorkloadError, TraceError):
            self.single = None
            return []
        return [self._join(recomputes, [recorder, recorder])]

    def _join(self, recomputes: Mapping[str, Recompute], recorders: list[Recorder]) -> Run:
        events = [recorder.events for recorder in recorders]
        return join_runs(recomputes, events, _MICRO_BATCHES, self.kernels, is_sampled=self.is_sampled)

    def evaluation(self, structure: Structure) -> tuple[SectionTrace, ...]:
        found = [item for run in self.evaluations for item in cut_sections(structure, run)]
        return tuple(first_of_each(found))

    def traces(self, structure: Structure) -> tuple[SectionTrace, ...]:
        found = [item for run in self.runs for item in cut_sections(structure, run)]
        return tuple(first_of_each(found))

    def alone(self, structure: Structure) -> tuple[SectionTrace, ...]:
        """Traces of one sample, those that differ from what the others say of it."""
        return self._that_differ(structure, self.single_runs, self.traces(structure))

    def alone_evaluation(self, structure: Structure) -> tuple[SectionTrace, ...]:
        return self._that_differ(structure, self.single_evaluations, self.evaluation(structure))

    def _that_differ(
        self, structure: Structure, runs: list[Run], known: tuple[SectionTrace, ...]
    ) -> tuple[SectionTrace, ...]:
        if self.single is None:
            return ()
        found = first_of_each([item for run in runs for item in cut_sections(structure, run)])
        return tuple(item for item in found if item not in [of_one_sample(trace) for trace in known])

    def work(self, structure: Structure) -> tuple[SectionWork, ...]:
        if not self.counts_work:
            return ()
        pairs = zip(self.runs, self.counters, strict=True)
        found = [item for run, pair in pairs for item in cut_work(structure, run, pair, _MICRO_BATCHES)]
        return tuple(first_of_each(found))


def _first_batch(workload: Workload, micro_batch: int) -> Any:
    """The first batch, whose shapes stand for all. Raises TraceError where the second one's differ."""
    batches = user_code.batches(workload, 0, 1, micro_batch, 0, 0)
    batch, later = next(batches), next(batches)
    if _shapes(later) != _shapes(batch):
        raise TraceError(
            "",
            f"batches differ in shape from one to the next: {_shapes(batch)}, then {_shapes(later)}",
            "Pad or cut every sample to one length, so that each step holds what was planned",
        )
    return batch


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _bytes_per_sample(batches: list[Any]) -> int:
    small, large = (
        sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)) for batch in batches
    )
    difference = _MICRO_BATCHES[1] - _MICRO_BATCHES[0]
    per_sample, rest = divmod(large - small, difference)
    if rest or small != per_sample * _MICRO_BATCHES[0]:
        raise TraceError(
            "",
            "batches do not grow in proportion to the micro-batch",
            "Yield tensors whose first dimension is the micro-batch and whose other dimensions are fixed",
        )
    return per_sample
