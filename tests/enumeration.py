"""Small planning problems in which every plan can be looked at: the truth that the planner is held against."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any, get_args

from osdp_ray.costs import simulate_sections, step_seconds
from osdp_ray.planning.choices import (
    RECOMPUTES,
    choices_of,
    group_units,
    large_operators,
    split_assignments,
    with_slices,
)
from osdp_ray.records.plan import ScatterGroup, SectionPlan, Synchronise, Unit, slice_name
from osdp_ray.records.profile import Profile, Section, SectionClass
from tests.random_profiles import random_profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
    """A profile, a batch shape, options of a step, and a budget between the leanest and the fattest uniform plan."""

    profile: Profile
    micro_batch: int
    accumulation: int
    budget_bytes: int
    prefetch: int
    scatter_group: ScatterGroup

    @property
    def wishes(self) -> dict[str, Any]:
        """The instance as arguments of `plan`."""
        return {
            "budget_bytes": self.budget_bytes,
            "global_batch": self.samples,
            "micro_batch": self.micro_batch,
            "prefetch": self.prefetch,
            "scatter_group": self.scatter_group,
        }

    @property
    def synchronises(self) -> tuple[Synchronise, ...]:
        return ("every", "last") if self.accumulation > 1 else ("every",)

    @property
    def samples(self) -> int:
        return self.micro_batch * self.accumulation * self.profile.num_ranks


def random_instance(seed: int) -> Instance:
    """At most some ten thousand plans: two blocks of two operators, or one operator per block on nodes, or in three."""
    kind = seed % 3
    layers = 3 if kind == 2 else 2
    return _instance(seed, max_layers=layers, merge=True, whole_blocks=kind > 0, nodes=kind == 1)


def _instance(seed: int, **options: Any) -> Instance:
    rng, options_rng = random.Random(seed), random.Random(f"options of a step {seed}")
    profile = random_profile(rng, **options)
    micro_batch, accumulation = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3))
    prefetch = 1 if profile.overlaps else options_rng.choice((0, 0, 1))
    scatter_group = options_rng.choice(get_args(ScatterGroup))
    peaks = []
    for choice, recompute in itertools.product(choices_of(profile), RECOMPUTES):
        sections = tuple(ways(profile, s, (choice,), (recompute,))[0] for s in profile.sections)
        held = simulate_sections(
            profile, sections, micro_batch=micro_batch, accumulation=accumulation, prefetch=prefetch
        )
        peaks.append(held.peak_bytes)
    fraction = rng.random() * rng.random()
    budget_bytes = min(peaks) + round(fraction * (max(peaks) - min(peaks)))
    return Instance(
        profile=profile,
        micro_batch=micro_batch,
        accumulation=accumulation,
        budget_bytes=budget_bytes,
        prefetch=prefetch,
        scatter_group=scatter_group,
    )


def random_split_instance(seed: int) -> Instance:
    """One block whose second operator may be split."""
    return _instance(seed, max_layers=1, merge=True, splits=True)


def ways(profile: Profile, section: Section, choices, recomputes=RECOMPUTES) -> list[SectionPlan]:
    """Every choice of every operator with every way to recompute, dominated ones too.

    Two slices choose freely, and more of them as the menu has it.
    """
    section_class = profile.classes[section.class_index]
    large = large_operators(profile, section.class_index)
    halves = [slice_name(section_class.operators[i].name, half, 2) for i in large for half in range(2)]
    every = list(_free(section_class, choices))
    if large:
        every += [
            *_free(with_slices(section_class, halves), choices),
            *split_assignments(section_class, choices, large),
        ]
    ways_to_recompute = recomputes if section_class.is_block else RECOMPUTES[:1]
    return [
        SectionPlan(name=section.name, is_block=section_class.is_block, recompute=recompute, units=units)
        for units in every
        for recompute in ways_to_recompute
    ]


def _free(section_class: SectionClass, choices) -> Iterator[tuple[Unit, ...]]:
    names = [operator.name for operator in section_class.operators]
    for combination in itertools.product(choices, repeat=len(names)):
        yield group_units(section_class, dict(zip(names, combination, strict=True)))


def every_plan(instance: Instance) -> Iterator[tuple[tuple[SectionPlan, ...], Synchronise, float]]:
    """(sections, synchronise, step seconds) of every assignment of decisions to sections."""
    profile = instance.profile
    menus = [ways(profile, s, choices_of(profile)) for s in profile.sections]
    for sections in itertools.product(*menus):
        for synchronise in instance.synchronises:
            phases = step_seconds(
                profile,
                sections,
                micro_batch=instance.micro_batch,
                accumulation=instance.accumulation,
                synchronise=synchronise,
                prefetch=instance.prefetch,
                scatter_group=instance.scatter_group,
            )
            yield sections, synchronise, sum(phases.values())


def fits(instance: Instance, sections: tuple[SectionPlan, ...], synchronise: Synchronise) -> bool:
    held = simulate_sections(
        instance.profile,
        sections,
        micro_batch=instance.micro_batch,
        accumulation=instance.accumulation,
        synchronise=synchronise,
        prefetch=instance.prefetch,
    )
    return held.peak_bytes <= instance.budget_bytes


def lowest_peak_bytes(instance: Instance) -> int:
    """The peak of the leanest of all plans that reduce in every micro-batch."""
    profile = instance.profile
    menus = [ways(profile, s, choices_of(profile)) for s in profile.sections]
    shape = {
        "micro_batch": instance.micro_batch,
        "accumulation": instance.accumulation,
        "prefetch": instance.prefetch,
    }
    return min(simulate_sections(profile, sections, **shape).peak_bytes for sections in itertools.product(*menus))


def faster_plan_that_fits(instance: Instance, step_s: float, *, slack_fraction: float = 1e-6) -> float | None:
    """The seconds of the fastest plan that fits and is faster than `step_s`, if there is one."""
    faster = [item for item in every_plan(instance) if item[2] < step_s * (1 - slack_fraction)]
    for sections, synchronise, seconds in sorted(faster, key=lambda item: item[2]):
        if fits(instance, sections, synchronise):
            return seconds
    return None
