"""Why a plan is as it is: what binds, what every operator's next-best choice would cost, what more memory would buy.

Alternatives are tried one section at a time in the simulator, so their seconds and bytes are differences of whole
steps. The price of memory is that of planning again with a little more of it.
"""

import dataclasses
import itertools

from osdp_ray.costs import explain_peaks, predict_sections
from osdp_ray.planning import plan as make_plan
from osdp_ray.planning.choices import RECOMPUTES, choices_of, group_units, made_whole
from osdp_ray.planning.costing import slowed_fraction
from osdp_ray.planning.layout import compute_s
from osdp_ray.planning.menus import Menu, StepShape
from osdp_ray.planning.search import as_words, largest_operator
from osdp_ray.records.plan import Plan, Prediction, SectionPlan, parse_slice, short_names
from osdp_ray.records.profile import Profile
from osdp_ray.units import GIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One decision changed in one section: what the step then takes more, and its peak holds more (or less)."""

    change: str
    more_s: float
    more_bytes: int
    fits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reason:
    """A decision of a run of equal sections. `wanted` would be faster and does not fit; `next_best` fits and is slower
    (or holds more for nothing). Either is None where there is no such choice."""

    sections: str
    num_sections: int
    subject: str
    decision: str
    wanted: Step | None
    next_best: Step | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `osdp explain` tells of a plan.

    binding_...        the phase, section and operator at the peak          free_bytes  of the budget
    binding_resource   'compute', 'link' or 'both': what the step spends most of its seconds on
    more_memory_bytes  how much more was given, and how many seconds shorter a step of as many samples then is
    compute_floor_s, link_floor_s, floor_s   what no plan of this batch undercuts
    """

    binding_phase: str
    binding_section: str
    binding_operator: str
    free_bytes: int
    binding_resource: str
    reasons: tuple[Reason, ...]
    more_memory_bytes: int
    saved_s: float
    compute_floor_s: float
    link_floor_s: float
    floor_s: float

    @property
    def saved_s_per_gib(self) -> float:
        return self.saved_s / (self.more_memory_bytes / GIB)


def explain(profile: Profile, plan: Plan) -> Explanation:
    """The reasons of a plan that was made from this profile. Raises SolverError."""
    shape = StepShape(
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        synchronise=plan.synchronise,
        prefetch=plan.prefetch,
        scatter_group=plan.scatter_group,
    )
    peak = max(explain_peaks(profile, plan), key=lambda found: found.peak_bytes)
    compute_floor_s, link_floor_s, floor_s = floors(profile, shape)
    more_bytes = GIB if plan.budget_bytes >= 8 * GIB else max(1, plan.budget_bytes // 8)
    richer = make_plan(
        profile,
        budget_bytes=plan.budget_bytes + more_bytes,
        global_batch=plan.global_batch,
        prefetch=plan.prefetch,
        scatter_group=plan.scatter_group,
    )
    return Explanation(
        binding_phase=peak.phase,
        binding_section=peak.section,
        binding_operator=largest_operator(profile, peak.section),
        free_bytes=plan.budget_bytes - plan.prediction.device_bytes,
        binding_resource=_resource(plan.prediction),
        reasons=tuple(_reasons(profile, plan, shape)),
        more_memory_bytes=more_bytes,
        saved_s=max(0.0, plan.prediction.step_s - richer.prediction.step_s),
        compute_floor_s=compute_floor_s,
        link_floor_s=link_floor_s,
        floor_s=floor_s,
    )


def floors(profile: Profile, shape: StepShape) -> tuple[float, float, float]:
    """Seconds of computing, of communication, and of both, that no plan of this shape undercuts."""
    link_s = turns_s = optimizer_s = 0.0
    menus = [Menu(profile, index, shape) for index in range(len(profile.classes))]
    for section in profile.sections:
        seconds = menus[section.class_index].seconds
        gathers = shape.accumulation * (seconds["gather_forward_s"] + seconds["gather_backward_s"])
        turns = gathers + shape.num_reducing * seconds["reduce_s"]
        late = shape.num_reducing * seconds["late_reduce_s"]
        link_s += float((turns + late).min())
        turns_s += float((turns + slowed_fraction(profile) * late).min())
        optimizer_s += float(seconds["optimizer_s"].min())
    computing_s = compute_s(profile, shape) + optimizer_s
    floor_s = max(computing_s, link_s) if profile.overlaps else max(computing_s + turns_s, link_s)
    return computing_s, link_s, floor_s


def _resource(prediction: Prediction) -> str:
    phases = prediction.step_s_by_phase
    exposed = phases.get("communication", 0.0) / prediction.step_s
    return "link" if exposed > 0.5 else "both" if exposed > 0.1 else "compute"


def _reasons(profile: Profile, plan: Plan, shape: StepShape) -> list[Reason]:
    reasons = []
    position = 0
    trial = _Trial(profile, plan, shape)
    described = zip(plan.sections, profile.sections, strict=True)
    for _, group in itertools.groupby(
        described, key=lambda pair: (pair[1].class_index, pair[0].recompute, pair[0].units)
    ):
        run = [section for section, _ in group]
        name = run[0].name if len(run) == 1 else f"{run[0].name} .. {run[-1].name}"
        if run[0].units:
            reasons += trial.reasons(name, position, len(run))
        position += len(run)
    return reasons


class _Trial:
    """Tries other decisions in one section of a plan."""

    def __init__(self, profile: Profile, plan: Plan, shape: StepShape) -> None:
        self.profile, self.plan, self.shape = profile, plan, shape

    def reasons(self, name: str, position: int, num: int) -> list[Reason]:
        """A reason per unit of the section at a position, and one for its recomputation."""
        section = self.plan.sections[position]
        section_class = self.profile.classes[self.profile.sections[position].class_index]
        chosen = {operator: unit.choice for unit in section.units for operator in unit.operators}
        found = []
        for made, operators in section.units_alike():
            steps = []
            for choice in choices_of(self.profile):
                if choice != made:
                    units = group_units(section_class, chosen | dict.fromkeys(operators, choice))
                    changed = dataclasses.replace(section, units=units)
                    steps.append(self._step(position, changed, choice.label))
            splits = {parse_slice(operator)[0] for operator in operators} - {*operators}
            if splits and (whole := made_whole(section_class, section, splits)) is not None:
                steps.append(self._step(position, whole, "whole"))
            found.append(self._reason(name, num, ", ".join(short_names(operators)), made.label, steps))
        if section.is_block:
            steps = [
                self._step(position, dataclasses.replace(section, recompute=other), f"recompute {other}")
                for other in RECOMPUTES
                if other != section.recompute
            ]
            found.append(self._reason(name, num, "activations", f"recompute {section.recompute}", steps))
        return found

    def _step(self, position: int, changed: SectionPlan, change: str) -> Step:
        sections = (*self.plan.sections[:position], changed, *self.plan.sections[position + 1 :])
        prediction = predict_sections(self.profile, sections, **as_words(self.shape))
        return Step(
            change=change,
            more_s=prediction.step_s - self.plan.prediction.step_s,
            more_bytes=prediction.peak_bytes - self.plan.prediction.peak_bytes,
            fits=prediction.device_bytes <= self.plan.budget_bytes,
        )

    @staticmethod
    def _reason(name: str, num: int, subject: str, decision: str, steps: list[Step]) -> Reason:
        wanted = [step for step in steps if step.more_s < 0 and not step.fits]
        fitting = [step for step in steps if step.fits]
        return Reason(
            sections=name,
            num_sections=num,
            subject=subject,
            decision=decision,
            wanted=min(wanted, key=lambda step: step.more_s, default=None),
            next_best=min(fitting, key=lambda step: (step.more_s, step.more_bytes), default=None),
        )
