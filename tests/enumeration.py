"""Small planning problems in which every plan can be looked at: the truth that the planner is held against."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

from osdp_ray.costs import simulate_sections, step_seconds
from osdp_ray.planning.choices import RECOMPUTES, choices_of, group_units
from osdp_ray.records.plan import SectionPlan, Synchronise
from osdp_ray.records.profile import Profile, SectionClass
from tests.random_profiles import random_profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
    """A profile, a batch shape and a budget between the leanest and the fattest uniform plan."""

    profile: Profile
    micro_batch: int
    accumulation: int
    budget_bytes: int

    @property
    def synchronises(self) -> tuple[Synchronise, ...]:
        return ("every", "last") if self.accumulation > 1 else ("every",)

    @property
    def samples(self) -> int:
        return self.micro_batch * self.accumulation * self.profile.num_ranks


def random_instance(seed: int) -> Instance:
    """At most some ten thousand plans: two blocks of two operators, or one operator per block on nodes, or in three."""
    rng = random.Random(seed)
    kind = seed % 3
    profile = random_profile(rng, max_layers=3 if kind == 2 else 2, merge=True, whole_blocks=kind > 0, nodes=kind == 1)
    micro_batch, accumulation = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3))
    peaks = []
    for choice, recompute in itertools.product(choices_of(profile), RECOMPUTES):
        sections = tuple(
            ways(profile.classes[s.class_index], s.name, (choice,), (recompute,))[0] for s in profile.sections
        )
        held = simulate_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation)
        peaks.append(held.peak_bytes)
    fraction = rng.random() * rng.random()
    budget_bytes = min(peaks) + round(fraction * (max(peaks) - min(peaks)))
    return Instance(profile=profile, micro_batch=micro_batch, accumulation=accumulation, budget_bytes=budget_bytes)


def ways(section_class: SectionClass, name: str, choices, recomputes=RECOMPUTES) -> list[SectionPlan]:
    """Every choice of every operator with every way to recompute, dominated ones too."""
    names = [operator.name for operator in section_class.operators]
    found = []
    for combination in itertools.product(choices, repeat=len(names)):
        units = group_units(section_class, dict(zip(names, combination, strict=True)))
        for recompute in recomputes if section_class.is_block else RECOMPUTES[:1]:
            found.append(SectionPlan(name=name, is_block=section_class.is_block, recompute=recompute, units=units))
    return found


def every_plan(instance: Instance) -> Iterator[tuple[tuple[SectionPlan, ...], Synchronise, float]]:
    """(sections, synchronise, step seconds) of every assignment of decisions to sections."""
    profile = instance.profile
    menus = [ways(profile.classes[s.class_index], s.name, choices_of(profile)) for s in profile.sections]
    for sections in itertools.product(*menus):
        for synchronise in instance.synchronises:
            phases = step_seconds(
                profile,
                sections,
                micro_batch=instance.micro_batch,
                accumulation=instance.accumulation,
                synchronise=synchronise,
            )
            yield sections, synchronise, sum(phases.values())


def fits(instance: Instance, sections: tuple[SectionPlan, ...], synchronise: Synchronise) -> bool:
    held = simulate_sections(
        instance.profile,
        sections,
        micro_batch=instance.micro_batch,
        accumulation=instance.accumulation,
        synchronise=synchronise,
    )
    return held.peak_bytes <= instance.budget_bytes


def lowest_peak_bytes(instance: Instance) -> int:
    """The peak of the leanest of all plans that reduce in every micro-batch."""
    profile = instance.profile
    menus = [ways(profile.classes[s.class_index], s.name, choices_of(profile)) for s in profile.sections]
    shape = {"micro_batch": instance.micro_batch, "accumulation": instance.accumulation}
    return min(simulate_sections(profile, sections, **shape).peak_bytes for sections in itertools.product(*menus))


def faster_plan_that_fits(instance: Instance, step_s: float, *, slack_fraction: float = 1e-6) -> float | None:
    """The seconds of the fastest plan that fits and is faster than `step_s`, if there is one."""
    faster = [item for item in every_plan(instance) if item[2] < step_s * (1 - slack_fraction)]
    for sections, synchronise, seconds in sorted(faster, key=lambda item: item[2]):
        if fits(instance, sections, synchronise):
            return seconds
    return None
