"""A leaner choice of one operator, or recomputing one block, never raises the peak by more than what that itself holds.

Sharding and gathering again trade bytes that stay for buffers of a moment: a gather's flat buffer beside the whole
parameters, a reduction's input, the buffer gathered ahead for the section before. Recomputing keeps the parameters
gathered meanwhile, and a copy of the random state. Where such a moment is the highest of the step, the peak rises by
those bytes at most; the ledger names them.
"""

import dataclasses
import random

import pytest

from osdp_ray.costs import explain_peaks, simulate_bytes, table_of
from osdp_ray.planning.choices import group_units
from osdp_ray.records.plan import Choice, SectionPlan
from tests.oracle import make_plan
from tests.random_profiles import random_profile

NUM_SEEDS, NUM_CHANGES = 40, 6
RANDOM_STATE_BYTES = 5056  # torch's CPU generator
LEANER = {
    Choice(shard_over="none", regather=False): Choice(shard_over="world", regather=False),
    Choice(shard_over="none", regather=True): Choice(shard_over="world", regather=True),
    Choice(shard_over="world", regather=False): Choice(shard_over="world", regather=True),
}
LEANEST = Choice(shard_over="world", regather=True)


def random_section(profile, section, rng):
    section_class = profile.classes[section.class_index]
    choices = {operator.name: rng.choice([*LEANER, LEANEST]) for operator in section_class.operators}
    recompute = rng.choice(("none", "full")) if section_class.is_block else "none"
    units = group_units(section_class, choices)
    return SectionPlan(name=section.name, is_block=section_class.is_block, recompute=recompute, units=units)


def leaner(section_class, section, rng):
    """The section with one of its operators leaner, or recomputed; None where the one drawn is as lean as can be."""
    if section.is_block and section.recompute == "none" and rng.random() < 0.3:
        return dataclasses.replace(section, recompute="full")
    choices = {operator: unit.choice for unit in section.units for operator in unit.operators}
    operator = rng.choice(sorted(choices))
    if choices[operator] not in LEANER:
        return None
    choices[operator] = LEANER[choices[operator]]
    return dataclasses.replace(section, units=group_units(section_class, choices))


def moment_bytes(profile, class_index, section):
    """The most that the collectives of a section hold at once, and the random state of one that recomputes."""
    sizes = [table_of(profile).unit_bytes(class_index, unit) for unit in section.units]
    collectives = sum(size.flat_bytes + size.gathered_bytes + size.reduce_bytes for size in sizes)
    return collectives + (RANDOM_STATE_BYTES if section.recompute != "none" else 0)


def changes(seed):
    """(profile, index of a section, plan, plan in which that section is leaner)."""
    rng = random.Random(seed)
    profile = random_profile(rng, max_layers=4, merge=rng.random() < 0.7)
    sections = [random_section(profile, section, rng) for section in profile.sections]
    for _ in range(NUM_CHANGES):
        index, accumulation = rng.randrange(len(sections)), rng.choice((1, 2))
        changed = leaner(profile.classes[profile.sections[index].class_index], sections[index], rng)
        if changed is not None:
            after = (*sections[:index], changed, *sections[index + 1 :])
            plans = [
                make_plan(profile, tuple(chosen), micro_batch=2, accumulation=accumulation)
                for chosen in (sections, after)
            ]
            yield profile, index, *plans


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_leaner_choice_raises_the_peak_by_its_own_moment_at_most(seed):
    for profile, index, plan, leaner_plan in changes(seed):
        rise_bytes = simulate_bytes(profile, leaner_plan).peak_bytes - simulate_bytes(profile, plan).peak_bytes
        allowed = moment_bytes(profile, profile.sections[index].class_index, leaner_plan.sections[index])
        assert rise_bytes <= allowed, [
            (peak.phase, peak.section, peak.peak_bytes, peak.holdings[:6])
            for chosen in (plan, leaner_plan)
            for peak in explain_peaks(profile, chosen)
        ]


def test_most_leaner_choices_do_lower_or_keep_the_peak():
    rises = [
        simulate_bytes(profile, leaner_plan).peak_bytes > simulate_bytes(profile, plan).peak_bytes
        for seed in range(NUM_SEEDS)
        for profile, _, plan, leaner_plan in changes(seed)
    ]
    assert len(rises) > NUM_SEEDS
    assert sum(rises) < 0.1 * len(rises)
