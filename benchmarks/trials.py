"""Training steps of many plans, one after the other, on the same measuring actors: a model is built under a plan,
trains for some steps by the executor's own loop, and is dropped. Only starting processes is left out.
"""

import contextlib
import dataclasses
import gc
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from osdp_ray.costs import predict_sections
from osdp_ray.execution.options import TrainOptions
from osdp_ray.execution.worker import TrainLoop
from osdp_ray.planning.choices import group_units, uniform_sections
from osdp_ray.profiling.actors import MeasuringGroup
from osdp_ray.records.plan import Choice, Plan, SectionPlan, SolverReport
from osdp_ray.records.profile import Profile, Recompute
from osdp_ray.records.telemetry import Sample
from osdp_ray.workload import Workload

WARM_UP_STEPS = 2  # the first makes the optimizer's state and opens connections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What the steps of a plan took, each step by its slowest rank."""

    step_s: tuple[float, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def try_plan(group: MeasuringGroup, workload: Workload, plan: Plan, *, num_steps: int, limit_s: float = 120.0) -> Trial:
    """Trains `num_steps` measured steps under a plan on a group, after two that warm up."""
    per_rank = group.run(train_steps, workload, plan.to_json(), num_steps + WARM_UP_STEPS, timeout_s=limit_s)
    counted = [samples[WARM_UP_STEPS:] for samples in per_rank]

    def median(name: str) -> float:
        return statistics.median(max(getattr(s, name) for s in step) for step in zip(*counted, strict=True))

    return Trial(
        step_s=tuple(max(sample.step_s for sample in step) for step in zip(*counted, strict=True)),
        forward_s=median("forward_s"),
        backward_s=median("backward_s"),
        optimizer_s=median("optimizer_s"),
    )


def train_steps(workload: Workload, plan: dict[str, Any], num_steps: int) -> list[Sample]:
    """Runs on every rank: the samples of `num_steps` steps."""
    observer = _Recorder()
    loop = _Loop(
        workload=workload,
        plan=Plan.from_json(plan),
        options=TrainOptions(num_steps=num_steps),
        run_dir="",
        plan_index=0,
        device=torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"),
        observer=observer,
    )
    loop.run(None)
    del loop
    gc.collect()
    return observer.samples


class _Loop(TrainLoop):
    """The executor's loop, which writes nothing."""

    def _save(self) -> None:
        pass

    def _evaluate(self) -> None:
        return None


@dataclasses.dataclass
class _Memory:
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    num_retries: int = 0


class _Recorder:
    """Keeps samples where training pushes them to a hub."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    @contextlib.contextmanager
    def measure(self, step: int, live_bytes: Any) -> Iterator[_Memory]:
        yield _Memory()

    def record(self, sample: Sample) -> None:
        self.samples.append(sample)

    def is_sampled(self, step: int) -> bool:
        return False

    def attend(self) -> str:
        return ""

    def command(self) -> str:
        return ""

    def persistent_bytes(self, *_: Any) -> int:
        return 0

    def resident_bytes(self) -> int:
        return 0


def plan_of(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int = 1,
    budget_bytes: int = 1 << 40,
) -> Plan:
    """A plan of these decisions with its prediction; nothing is searched."""
    return Plan(
        workload=profile.workload,
        workload_hash=profile.workload_hash,
        ranks_per_node=profile.ranks_per_node,
        precision=profile.precision,
        budget_bytes=budget_bytes,
        global_batch=micro_batch * accumulation * profile.num_ranks,
        micro_batch=micro_batch,
        accumulation=accumulation,
        synchronise="every",
        sections=sections,
        prediction=predict_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation),
        alternatives=(),
        solver=SolverReport(solver="none", status="feasible", gap_fraction=0.0, num_solves=0, num_cuts=0),
    )


def uniform(profile: Profile, choice: Choice, recompute: Recompute = "none") -> tuple[SectionPlan, ...]:
    return uniform_sections(profile, choice, recompute)


def blocks_in_turn(
    profile: Profile, choices: Sequence[Choice], recomputes: Sequence[Recompute] = ("none",)
) -> tuple[SectionPlan, ...]:
    """Sections that take the choices in turn, each as a whole."""
    sections = []
    for index, section in enumerate(profile.sections):
        chosen = uniform_sections(profile, choices[index % len(choices)], recomputes[index % len(recomputes)])
        sections.append(dataclasses.replace(chosen[index], name=section.name))
    return tuple(sections)


def operators_in_turn(profile: Profile, choices: Sequence[Choice]) -> tuple[SectionPlan, ...]:
    """Sections whose operators take the choices in turn, so that a block has a unit for each."""
    sections = []
    for index, section in enumerate(profile.sections):
        section_class = profile.classes[section.class_index]
        chosen = {operator.name: choices[i % len(choices)] for i, operator in enumerate(section_class.operators)}
        whole = uniform_sections(profile, choices[0], "none")[index]
        sections.append(dataclasses.replace(whole, units=group_units(section_class, chosen)))
    return tuple(sections)
