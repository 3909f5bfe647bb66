"""The last pass over a plan: what changes save and hold, and that it only ever improves."""

import dataclasses
import random

import pytest

from osdp_ray.costs import simulate_sections, step_seconds
from osdp_ray.planning.choices import DP, ZERO3, group_units, uniform_sections, with_slices
from osdp_ray.planning.layout import build_layout, compute_s
from osdp_ray.planning.menus import StepShape
from osdp_ray.planning.polish import _Levels, _Polish, _without_idle_slices, polished
from osdp_ray.planning.relaxation import relax
from osdp_ray.planning.search import as_words, bytes_words, candidate
from osdp_ray.records.plan import slice_name
from tests.random_profiles import random_profile

SHAPES = (
    StepShape(micro_batch=2, accumulation=1),
    StepShape(micro_batch=2, accumulation=3),
    StepShape(micro_batch=2, accumulation=4, synchronise="last"),
)


def deep(profile, num_layers):
    stem, block, *_, head = profile.sections
    blocks = [dataclasses.replace(block, name=f"blocks.{i}") for i in range(num_layers)]
    return dataclasses.replace(profile, sections=(stem, *blocks, head))


def random_case(seed, num_layers=6, merge=True):
    rng = random.Random(seed)
    merge = merge and rng.random() < 0.5
    profile = deep(random_profile(rng, max_layers=2, merge=merge, nodes=seed % 3 == 1), num_layers)
    shape = rng.choice(SHAPES)
    menus = build_layout(profile, shape).menus
    sections = tuple(
        menus[section.class_index].section(rng.randrange(menus[section.class_index].num_columns), section.name)
        for section in profile.sections
    )
    return rng, profile, candidate(profile, sections, shape)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_change_saves_is_what_the_simulator_says(seed):
    rng, profile, found = random_case(seed)
    polish = _Polish(profile, found)
    assert polish.is_known
    for _ in range(10):
        position = rng.randrange(len(profile.sections))
        menu = polish.layout.menus[profile.sections[position].class_index]
        column = rng.randrange(menu.num_columns)
        changed = list(found.sections)
        changed[position] = menu.section(column, changed[position].name)
        seconds = sum(step_seconds(profile, tuple(changed), **as_words(found.shape)).values())
        more_s = seconds - found.prediction.step_s
        assert polish._more_s(position)[column] == pytest.approx(more_s, rel=1e-6, abs=1e-9 * seconds)
        columns = [*polish.columns[:position], column, *polish.columns[position + 1 :]]
        assert polish._total_s(columns) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_change_that_fits_is_taken_for_one_that_cannot(seed):
    rng, profile, found = random_case(seed, merge=False)  # hooks of merged operators run before their last gradients
    polish = _Polish(profile, found)
    budget_bytes = found.prediction.peak_bytes
    levels = _Levels(polish.layout, polish.classes, polish.columns)
    for position in range(len(profile.sections)):
        may_fit = levels.may_fit(position, budget_bytes)
        menu = polish.layout.menus[profile.sections[position].class_index]
        for column in rng.sample(range(menu.num_columns), min(4, menu.num_columns)):
            changed = list(found.sections)
            changed[position] = menu.section(column, changed[position].name)
            held = simulate_sections(profile, tuple(changed), **bytes_words(found.shape))
            assert may_fit[column] or held.peak_bytes > budget_bytes


@pytest.mark.parametrize("seed", range(8))
def test_a_polished_plan_fits_and_is_at_least_as_fast_and_the_same_again(seed):
    _, profile, found = random_case(seed, num_layers=9)
    budget_bytes = round(found.prediction.peak_bytes * 1.02)
    better = polished(profile, found, budget_bytes)
    assert better.prediction.peak_bytes <= budget_bytes
    assert better.prediction.step_s <= found.prediction.step_s
    assert better.shape == found.shape
    assert polished(profile, found, budget_bytes) == better


def test_where_everything_fits_a_whole_row_is_changed():
    profile = dataclasses.replace(deep(random_profile(random.Random(3), max_layers=2, merge=True), 40), overlaps=True)
    shape = SHAPES[0]
    lean = candidate(profile, uniform_sections(profile, ZERO3, "full"), shape)
    fat = candidate(profile, uniform_sections(profile, DP, "none"), shape)
    better = polished(profile, lean, 2 * fat.prediction.peak_bytes)
    assert {section.recompute for section in better.sections} == {"none"}
    assert better.prediction.step_s < lean.prediction.step_s


def test_decisions_that_are_in_no_menu_are_left_as_they_are():
    profile = deep(random_profile(random.Random(5), max_layers=2, merge=False), 3)
    found = candidate(profile, uniform_sections(profile, ZERO3, "full"), SHAPES[0])
    first = found.sections[1]
    (unit,) = first.units
    apart = tuple(
        dataclasses.replace(unit, operators=(name,), modules=(module,))
        for name, module in zip(unit.operators, unit.modules, strict=True)
    )
    sections = (found.sections[0], dataclasses.replace(first, units=apart), *found.sections[2:])
    odd = candidate(profile, sections, SHAPES[0])
    assert polished(profile, odd, 10 * odd.prediction.peak_bytes) == odd


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_a_deep_models_blocks_is_faster_than_the_bound(seed):
    rng = random.Random(seed)
    profile = deep(random_profile(rng, max_layers=2, merge=True, nodes=seed % 2 == 1), 14)
    profile = dataclasses.replace(profile, overlaps=True)
    shape = rng.choice(SHAPES)
    layout = build_layout(profile, shape)
    used = [rng.sample(range(menu.num_columns), min(3, menu.num_columns)) for menu in layout.menus]
    plans = []
    for _ in range(6):
        columns = [rng.choice(used[section.class_index]) for section in profile.sections]
        pairs = zip(profile.sections, columns, strict=True)
        sections = tuple(layout.menus[s.class_index].section(j, s.name) for s, j in pairs)
        plans.append((columns, candidate(profile, sections, shape).prediction))
    for columns, prediction in plans:
        size = {"budget_bytes": prediction.peak_bytes, "scale_bytes": prediction.peak_bytes}
        relaxation = relax(layout, **size, scale_s=compute_s(profile, shape))
        assert relaxation.bound <= prediction.step_s * (1 + 1e-7)
        slots = [0] + [1] * 14 + [2]
        worst = max(relaxation.reduced[slot][j] for slot, j in zip(slots, columns, strict=True))
        assert relaxation.bound + worst <= prediction.step_s * (1 + 1e-7)


def test_slices_that_save_neither_time_nor_needed_memory_are_made_whole_again():
    rng = random.Random(3)
    profile = deep(random_profile(rng, max_layers=1, merge=True, splits=True), 4)
    profile = dataclasses.replace(
        profile, overlaps=True, links=tuple(dataclasses.replace(link, latency_s=0.0) for link in profile.links)
    )
    whole = uniform_sections(profile, ZERO3, "none")
    block = profile.classes[1]
    large = block.operators[1].name
    cut = with_slices(block, [slice_name(large, i, 4) for i in range(4)])
    units = group_units(cut, {operator.name: ZERO3 for operator in cut.operators})
    sections = tuple(dataclasses.replace(s, units=units) if s.is_block else s for s in whole)
    split = candidate(profile, sections, StepShape(micro_batch=2, accumulation=1))
    assert any(section.splits for section in split.sections)

    roomy = _without_idle_slices(profile, split, 1 << 40)
    tight = _without_idle_slices(profile, split, split.prediction.peak_bytes)

    assert not any(section.splits for section in roomy.sections)
    assert roomy.samples_per_s >= split.samples_per_s * (1 - 1e-6)
    assert tight.prediction.peak_bytes <= split.prediction.peak_bytes
