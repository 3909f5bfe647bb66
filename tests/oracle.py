"""The truth about a step's bytes: the executor runs it for real and the CPU allocator's events are summed.

One process plays rank 0 of any number of ranks over a fake process group, whose collectives allocate nothing and return
at once. Profiles come from a trace alone, with round figures for seconds, so that nothing is measured.
"""

import dataclasses
import gc
import itertools
import random
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

from osdp_ray.costs import Splits, divides, split_class, splittable
from osdp_ray.planning.choices import uniform_sections
from osdp_ray.profiling.trace import Trace
from osdp_ray.records.plan import (
    Choice,
    Plan,
    Prediction,
    ScatterGroup,
    SectionPlan,
    SolverReport,
    Synchronise,
    Unit,
    parse_slice,
)
from osdp_ray.records.profile import Calibration, ComputeCost, LinkCost, OptimizerCost, Profile
from osdp_ray.workload import Workload
from tests.fake_rank import fake_rank

UNIFORM_CHOICES = {
    "DP": Choice(shard_over="none", regather=True),
    "DP kept": Choice(shard_over="none", regather=False),
    "ZeRO-2": Choice(shard_over="world", regather=False),
    "ZeRO-3": Choice(shard_over="world", regather=True),
}
# AdamW in its fused form: two moments per parameter, one step counter per tensor, nothing held while it steps.
FUSED_ADAMW = OptimizerCost(
    state_bytes_per_byte=2.0,
    state_bytes_per_tensor=4,
    step_bytes_per_largest=0.0,
    step_bytes_per_total=0.0,
    step_s_per_byte=1e-9,
    step_s_per_tensor=1e-5,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """What one step held: bytes between steps, the highest level, and what the step left behind beyond its start.

    `events` are the signed sizes of the allocator's events in order, `evaluation_bytes` the highest level of the
    evaluation after it.
    """

    persistent_bytes: int
    peak_bytes: int
    left_bytes: int
    events: tuple[int, ...]
    evaluation_bytes: int | None


def traced_profile(workload: Workload, traced: Trace, *, ranks_per_node: tuple[int, ...]) -> Profile:
    """A profile of a traced workload with round seconds: 1 ms + 2 ms per sample forward, twice that backward."""
    compute = tuple(
        ComputeCost(
            class_index=index,
            forward_constant_s=1e-3,
            forward_s_per_sample=2e-3,
            backward_constant_s=2e-3,
            backward_s_per_sample=4e-3,
            selective_constant_s=2e-4,
            selective_s_per_sample=4e-4,
        )
        for index in range(len(traced.structure.classes))
    )
    groups = ("world",) if len(ranks_per_node) == 1 else ("node", "across", "world")
    links = tuple(
        LinkCost(group=group, collective=collective, latency_s=5e-4, bytes_per_s=4e8, residual_fraction=0.0)
        for group in groups
        for collective in ("all_gather", "reduce_scatter", "all_reduce")
    )
    return Profile(
        workload=workload.name,
        workload_hash="0" * 16,
        device_kind="cpu",
        backend="fake",
        device_memory_bytes=1 << 34,
        ranks_per_node=ranks_per_node,
        precision=workload.precision,
        classes=traced.structure.classes,
        sections=traced.structure.sections,
        traces=traced.traces,
        evaluation=traced.evaluation,
        alone=traced.alone,
        alone_evaluation=traced.alone_evaluation,
        batch_bytes_per_sample=traced.batch_bytes_per_sample,
        buffer_bytes=traced.buffer_bytes,
        buffer_scratch_bytes=traced.buffer_scratch_bytes,
        scratch=traced.scratch,
        optimizer=FUSED_ADAMW,
        compute=compute,
        links=links,
        copy_bytes_per_s=1e10,
        calibration=Calibration(),
    )


def make_plan(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
    prefetch: int = 1,
    scatter_group: ScatterGroup = "shared",
) -> Plan:
    """A plan with these decisions and no prediction worth reading."""
    nothing = Prediction(
        peak_bytes=1,
        persistent_bytes=1,
        peak_by_phase={"forward": 1},
        step_s=1.0,
        step_s_by_phase={},
        samples_per_s=1.0,
    )
    return Plan(
        workload=profile.workload,
        workload_hash=profile.workload_hash,
        ranks_per_node=profile.ranks_per_node,
        precision=profile.precision,
        budget_bytes=1,
        global_batch=micro_batch * accumulation * profile.num_ranks,
        micro_batch=micro_batch,
        accumulation=accumulation,
        synchronise=synchronise,
        sections=sections,
        prediction=nothing,
        alternatives=(),
        solver=SolverReport(solver="none", status="optimal", gap_fraction=0.0, num_solves=0, num_cuts=0),
        prefetch=prefetch,
        scatter_group=scatter_group,
        parameter_counts=profile.parameter_counts,
    )


def uniform_plan(profile: Profile, name: str, recompute: str, *, micro_batch: int, accumulation: int = 1) -> Plan:
    """Every operator makes the same choice, every block recomputes alike."""
    sections = uniform_sections(profile, UNIFORM_CHOICES[name], recompute)
    return make_plan(profile, sections, micro_batch=micro_batch, accumulation=accumulation)


def random_sections(profile: Profile, rng: random.Random) -> tuple[SectionPlan, ...]:
    """A choice per operator out of one to three, in some sections the same for all; some blocks recompute.

    Some operators are split, each slice with its choice. Unlike in the planner's own plans, the unit at a block's door
    is any of its units, and slices may share a unit with other operators.
    """
    choices = list(UNIFORM_CHOICES.values())
    if len(profile.ranks_per_node) > 1:
        choices += [Choice(shard_over="node", regather=False), Choice(shard_over="node", regather=True)]
        choices.append(Choice(shard_over="world", regather=True, keep_node_shard=True))
    palette = rng.sample(choices, rng.randint(1, 3))
    sections = []
    for section in profile.sections:
        splits = _random_splits(profile, section.class_index, rng)
        section_class = split_class(profile.classes[section.class_index], splits).section_class
        is_uniform, shared = rng.random() < 0.4, rng.choice(palette)
        members: dict[tuple[Choice, int], list[int]] = {}
        for index, operator in enumerate(section_class.operators):
            is_alone = parse_slice(operator.name)[2] > 1 and rng.random() < 0.8
            choice = shared if is_uniform else rng.choice(palette)
            members.setdefault((choice, index if is_alone else -1), []).append(index)
        units = tuple(
            Unit(
                operators=tuple(section_class.operators[index].name for index in indices),
                modules=tuple(name for index in indices for name in section_class.operators[index].modules),
                choice=choice,
            )
            for (choice, _), indices in members.items()
        )
        recompute = rng.choice(("none", "selective", "full")) if section_class.is_block else "none"
        sections.append(
            SectionPlan(name=section.name, is_block=section_class.is_block, recompute=recompute, units=units)
        )
    return tuple(sections)


def _random_splits(profile: Profile, class_index: int, rng: random.Random) -> Splits:
    """Some operators of a class, of those that can be split, each with a number of slices."""
    splits = []
    for operator in splittable(profile, class_index):
        fitting = [num for num in (2, 4, 8) if divides(profile.classes[class_index], operator, num)]
        if fitting and rng.random() < 0.25:
            splits.append((operator, rng.choice(fitting)))
    return tuple(splits)


def measure(workload: Workload, plan: Plan, *, num_steps: int = 2, rank: int = 0, evaluates: bool = False) -> Truth:
    """Runs `num_steps` steps of a plan as one rank and returns the truth of the last one (the first one differs).

    With `evaluates` an evaluation comes after it.
    """
    with fake_rank(workload, plan, rank=rank) as played:
        live = played.persistent_bytes()  # from here on events tell: FSDP2 may hold a buffer between steps
        for _ in range(num_steps):
            gc.collect()  # Python keeps buffers of the last step alive until then
            persistent = played.persistent_bytes()
            events = events_of(played.step)
            peak = live + _highest(events)
            live += sum(events)
        evaluation = live + _highest(events_of(played.evaluate)) if evaluates else None
    return Truth(
        persistent_bytes=persistent,
        peak_bytes=peak,
        left_bytes=sum(events),
        events=events,
        evaluation_bytes=evaluation,
    )


def events_of(action: Callable[[], None]) -> tuple[int, ...]:
    """Signed sizes of the allocator's events while an action runs."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return tuple(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


def _highest(events: tuple[int, ...]) -> int:
    return max(0, *itertools.accumulate(events))
