"""The planner's parts: batch shapes, menus, units, the program, and what a plan tells."""

import dataclasses
import random

import pytest

from osdp_ray.costs import predict_sections
from osdp_ray.errors import InfeasibleError, SolverError, UsageError
from osdp_ray.planning import batch_shapes, plan
from osdp_ray.planning.choices import (
    CHOICES_OF_NODES,
    DP,
    RECOMPUTES,
    ZERO2,
    ZERO3,
    assignments,
    choices_of,
    group_units,
    uniform_sections,
)
from osdp_ray.planning.costing import _taking_turns, objective
from osdp_ray.planning.layout import build_layout, compute_s
from osdp_ray.planning.menus import Menu, StepShape
from osdp_ray.planning.program import Program
from osdp_ray.planning.relaxation import relax
from osdp_ray.records.plan import Choice
from osdp_ray.records.profile import Calibration
from osdp_ray.units import GIB, MIB
from tests.random_profiles import GROUPS, base_profile, merged

SHAPES = (
    StepShape(micro_batch=2, accumulation=1),
    StepShape(micro_batch=2, accumulation=3),
    StepShape(micro_batch=2, accumulation=2, synchronise="last"),
    StepShape(micro_batch=2, accumulation=4, synchronise="last"),
)


@pytest.fixture(scope="module")
def profile():
    return base_profile()


@pytest.fixture(scope="module")
def two_nodes(profile):
    links = tuple(dataclasses.replace(link, group=group) for link in profile.links for group in GROUPS)
    return dataclasses.replace(profile, ranks_per_node=(2, 2), links=links)


# -- batch shapes


def test_every_micro_batch_that_divides_the_global_batch_is_tried_small_ones_first():
    assert list(batch_shapes(4, 48, None)) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert list(batch_shapes(4, 48, 3)) == [(3, 4)]


def test_without_a_global_batch_a_step_is_one_micro_batch():
    shapes = list(batch_shapes(4, None, None))
    assert shapes[:3] == [(1, 1), (2, 1), (4, 1)]
    assert all(accumulation == 1 for _, accumulation in shapes)
    assert list(batch_shapes(4, None, 6)) == [(6, 1)]


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "remedy"),
    [
        (10, None, r"does not divide among 4 workers\. Use --global-batch 8 or 12, or another --num-workers"),
        (3, None, r"Use --global-batch 4, or"),
        (24, 4, r"among 4 workers x micro-batch 4\. Use --global-batch 16 or 32, .* or --micro-batch"),
        (0, None, r"give numbers above 0"),
        (8, -1, r"give numbers above 0"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused_with_the_nearest_that_can(global_batch, micro_batch, remedy):
    with pytest.raises(UsageError, match=remedy):
        list(batch_shapes(4, global_batch, micro_batch))


# -- units and menus


def test_operators_with_equal_choices_share_a_unit_and_the_heaviest_stands_at_the_blocks_door(profile):
    block = profile.classes[1]
    light = {"norm_1", "norm_2", "attention.projection"}
    choices = {operator.name: DP if operator.name in light else ZERO3 for operator in block.operators}

    door, other = group_units(block, choices)

    assert (door.choice, other.choice) == (ZERO3, DP)
    assert set(other.operators) == light
    assert {*door.operators, *other.operators} == {operator.name for operator in block.operators}


def test_a_uniform_setting_recomputes_blocks_alone(profile):
    sections = uniform_sections(profile, ZERO2, "full")
    assert [section.recompute for section in sections] == ["none", *["full"] * 4, "none"]
    assert {unit.choice for section in sections for unit in section.units} == {ZERO2}


@pytest.mark.parametrize(
    ("choice", "label"),
    [(DP, "DP"), (ZERO2, "ZeRO-2"), (ZERO3, "ZeRO-3"), (Choice(shard_over="node", regather=True), "HSDP")],
)
def test_a_choice_goes_by_the_name_of_its_field(choice, label):
    assert choice.label == label


@pytest.mark.parametrize("class_index", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_figures_of_columns_that_were_not_played_are_never_above_the_simulators(two_nodes, class_index, shape):
    menu = Menu(two_nodes, class_index, shape)
    rng = random.Random(class_index)
    for column in rng.sample(range(menu.num_columns), min(8, menu.num_columns)):
        for number, figures in enumerate(menu.measured(column)):
            for name in ("base", "kept", "after", "forward", "backward"):
                assert getattr(menu, name)[number][column] <= getattr(figures, name), (name, menu.section(column))
            assert menu.base[number][column] == figures.base
            assert menu.kept[number][column] == figures.kept


def test_a_menu_holds_every_uniform_setting_once_and_no_assignment_twice(two_nodes):
    menu = Menu(two_nodes, 1, SHAPES[0])
    uniform = [menu.section(column) for column in menu.uniform_columns()]
    assert len(uniform) == len(CHOICES_OF_NODES) * len(RECOMPUTES)
    everything = [menu.section(column) for column in range(menu.num_columns)]
    assert len(set(everything)) == len(everything)


def test_many_operators_mix_two_choices_and_equal_ones_are_taken_in_order(two_nodes):
    block = two_nodes.classes[1]
    many = dataclasses.replace(
        block,
        operators=tuple(
            dataclasses.replace(block.operators[1], name=f"copy_{i}", modules=(f"copy_{i}",)) for i in range(10)
        ),
    )
    found = assignments(many, CHOICES_OF_NODES)
    assert len(found) == 6 + 15 * 9
    assert all(len(units) <= 2 for units in found)


def test_nodes_are_groups_where_there_are_several_of_several_ranks_all_alike(profile, two_nodes):
    for nodes, expected in {(4,): 3, (1, 1): 3, (2, 3): 3, (2, 2): 6}.items():
        assert len(choices_of(dataclasses.replace(two_nodes, ranks_per_node=nodes))) == expected
    assert len(choices_of(dataclasses.replace(profile, ranks_per_node=(2, 2)))) == 3  # what their links cost is unknown


# -- the program


def program(layout, *, budget_bytes, is_relaxed=False, is_bound=False):
    columns = [layout.menu(slot).uniform_columns() for slot in range(len(layout.slots))]
    goal = objective(layout, is_bound=is_bound)
    scale = {"scale_bytes": budget_bytes, "scale_s": compute_s(layout.profile, layout.shape)}
    return Program(layout, columns, goal, budget_bytes=budget_bytes, is_relaxed=is_relaxed, **scale)


def deep(profile, num_layers):
    """The profile with that many blocks."""
    stem, block, *_, head = profile.sections
    blocks = [dataclasses.replace(block, name=f"blocks.{i}") for i in range(num_layers)]
    return dataclasses.replace(profile, sections=(stem, *blocks, head))


def test_the_program_says_none_where_nothing_fits_and_takes_what_is_fastest_where_all_does(profile):
    layout = build_layout(profile, SHAPES[0])
    assert program(layout, budget_bytes=MIB).solve() is None
    solution = program(layout, budget_bytes=4 * GIB).solve()
    fastest = [min(menu.uniform_columns(), key=lambda j: _taking_turns(menu)[j]) for menu in layout.menus]
    assert solution.counts == tuple({fastest[slot.class_index]: 1} for slot in layout.slots)
    assert solution.bound == pytest.approx(solution.value)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_relaxation_is_below_every_plan_and_prices_say_by_how_much_at_least(profile, overlaps):
    large = dataclasses.replace(deep(profile, 12), overlaps=overlaps)
    layout = build_layout(large, SHAPES[0])
    sections = uniform_sections(large, ZERO3, "none")
    held = predict_sections(large, sections, micro_batch=2, accumulation=1)
    relaxation = relax(layout, budget_bytes=held.peak_bytes, scale_bytes=held.peak_bytes, scale_s=0.1)
    assert relaxation.bound <= held.step_s
    menu = layout.menu(1)
    column = next(j for j in menu.uniform_columns() if menu.section(j).units == sections[1].units)
    assert relaxation.bound + relaxation.reduced[1][column] <= held.step_s * (1 + 1e-9)


def test_short_runs_of_blocks_are_taken_apart_and_long_ones_are_not(profile):
    assert [slot.num for slot in build_layout(profile, SHAPES[0]).slots] == [1] * 6
    assert [slot.num for slot in build_layout(deep(profile, 9), SHAPES[0]).slots] == [1, 9, 1]


def test_in_backward_what_lowers_the_level_comes_first_small_peaks_leading(profile):
    layout = build_layout(deep(profile, 9), SHAPES[0])
    menu = layout.menu(1)
    order = layout.canonical(1, range(menu.num_columns))[::-1]
    raised = [menu.after[0][j] - menu.kept[0][j] for j in order]
    lowers = [value <= 0 for value in raised]
    assert lowers == sorted(lowers, reverse=True)
    peaks = [menu.backward[0][j] for j, low in zip(order, lowers, strict=True) if low]
    assert peaks == sorted(peaks)
    rests = [menu.backward[0][j] - up for j, up, low in zip(order, raised, lowers, strict=True) if not low]
    assert rests == sorted(rests, reverse=True)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.6])
def test_a_deep_plan_keeps_its_budget_and_its_gap(profile, fraction):
    large = deep(profile, 24)
    peaks = [
        predict_sections(large, uniform_sections(large, choice, recompute), micro_batch=2, accumulation=1).peak_bytes
        for choice, recompute in ((ZERO3, "full"), (DP, "none"))
    ]
    budget_bytes = peaks[0] + round(fraction * (peaks[1] - peaks[0]))
    made = plan(large, budget_bytes=budget_bytes, global_batch=8, micro_batch=2)
    assert made.prediction.peak_bytes <= budget_bytes
    assert made.solver.gap_fraction < 0.02


def test_an_unknown_solver_is_refused_with_the_known_ones(profile, monkeypatch):
    monkeypatch.setenv("OSDP_SOLVER", "Gurobi")
    with pytest.raises(SolverError, match=r"solver Gurobi: .* Use one of HiGHS, CBC"):
        program(build_layout(profile, SHAPES[0]), budget_bytes=GIB).solve()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_the_solvers_print_nothing_and_warn_of_nothing(profile, solver, monkeypatch, capfd):
    monkeypatch.setenv("OSDP_SOLVER", solver)
    layout = build_layout(profile, SHAPES[0])
    assert program(layout, budget_bytes=24 * MIB, is_relaxed=True).solve().solver == solver
    assert program(layout, budget_bytes=24 * MIB).solve().solver == solver
    assert capfd.readouterr() == ("", "")


# -- plans


def test_a_plan_names_the_uniform_settings_that_it_beat(profile):
    made = plan(profile, budget_bytes=32 * MIB, global_batch=16, micro_batch=4)
    recomputes = ("", " + selective recompute", " + full recompute")
    expected = [f"{name}{recompute}" for name in ("DP", "ZeRO-2", "ZeRO-3") for recompute in recomputes]
    assert [other.name for other in made.alternatives] == expected
    for other in made.alternatives:
        fits = other.peak_bytes <= made.budget_bytes
        assert (other.samples_per_s is not None) == fits
        assert not fits or made.prediction.samples_per_s >= other.samples_per_s * (1 - 1e-9)


def test_a_budget_for_everything_replicates_everything_and_is_optimal(profile):
    made = plan(profile, budget_bytes=4 * GIB, global_batch=16, micro_batch=4)
    assert {section.recompute for section in made.sections} == {"none"}
    assert made.solver.status == "optimal"
    everything = predict_sections(profile, uniform_sections(profile, DP, "none"), micro_batch=4, accumulation=1)
    assert made.prediction.step_s <= everything.step_s


def test_the_global_batch_is_kept_whatever_the_micro_batch(profile):
    made = plan(profile, budget_bytes=16 * MIB, global_batch=8)
    assert made.global_batch == 8 == made.num_ranks * made.micro_batch * made.accumulation


def test_a_budget_that_nothing_fits_names_the_peak_phase_and_largest_operator(profile):
    small = merged(profile)
    with pytest.raises(InfeasibleError, match=r"no plan fits in 1\.00 MiB .* Raise --memory-budget to at least") as e:
        plan(small, budget_bytes=MIB, global_batch=16, micro_batch=4)
    assert e.value.phase in ("forward", "loss", "backward", "optimizer")
    assert e.value.holder.endswith(".norm_2")  # the one that the MLP's operators were merged into
    assert "lower --micro-batch (it is 4)" in str(e.value)
    assert e.value.leanest_bytes > e.value.budget_bytes


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(UsageError, match=r"Give --memory-budget a size, such as 2GiB"):
        plan(base_profile(), budget_bytes=0)


def test_what_a_run_taught_about_the_peak_is_kept_free(profile):
    taught = dataclasses.replace(profile, calibration=Calibration(peak_offset_bytes=4 * MIB))
    arguments = {"global_batch": 16, "micro_batch": 4}
    made = plan(taught, budget_bytes=20 * MIB, **arguments)
    plain = predict_sections(profile, made.sections, micro_batch=4, accumulation=1)
    assert made.prediction.peak_bytes == plain.peak_bytes + 4 * MIB <= 20 * MIB


def test_a_plan_does_not_flip_between_equals_when_seconds_change_a_little(profile):
    plans = []
    for factor in (1.0, 1 + 1e-9, 1 - 1e-9):
        links = tuple(dataclasses.replace(link, bytes_per_s=link.bytes_per_s * factor) for link in profile.links)
        copies = dataclasses.replace(profile, links=links, copy_bytes_per_s=profile.copy_bytes_per_s / factor)
        plans.append(plan(copies, budget_bytes=20 * MIB, global_batch=16))
    assert plans[0].decisions == plans[1].decisions == plans[2].decisions


def test_the_table_of_a_plan_shows_decisions_prediction_solver_and_alternatives(profile):
    text = plan(profile, budget_bytes=32 * MIB, global_batch=16, micro_batch=4).table()
    for part in ("known as", "4 ranks x micro-batch 4", "of 32.00 MiB per device", "solver", "ZeRO-3 + full recompute"):
        assert part in text
