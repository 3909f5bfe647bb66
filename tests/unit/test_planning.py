"""The planner's parts: batch shapes, menus, units, the program, and what a plan tells."""

import dataclasses

import pytest

from osdp_ray.costs import predict_sections, section_seconds
from osdp_ray.errors import InfeasibleError, SolverError, UsageError
from osdp_ray.planning import batch_shapes, plan
from osdp_ray.planning.menus import CHOICES, DP, ZERO2, ZERO3, Recipe, build_menu, group_units, uniform_sections
from osdp_ray.planning.solve import Problem, leanest, solve
from osdp_ray.records.plan import Choice, SectionPlan
from osdp_ray.records.profile import Calibration
from osdp_ray.units import GIB, MIB
from tests.random_profiles import base_profile, merged


@pytest.fixture(scope="module")
def profile():
    return base_profile()


def recipe(seconds, *, persistent=0, kept=0, gradient=0, forward=0, backward=0):
    return Recipe(
        units=(),
        recompute="none",
        seconds=seconds,
        persistent_bytes=persistent * MIB,
        kept_bytes=kept * MIB,
        gradient_bytes=gradient * MIB,
        forward_bytes=forward * MIB,
        backward_bytes=backward * MIB,
        inner_forward_bytes=forward * MIB,
        inner_backward_bytes=backward * MIB,
    )


def problem(menu, *, count, fixed_mib=0, step=0.0):
    return Problem(menus=(menu,), counts=(count,), fixed_bytes=fixed_mib * MIB, step_bytes_per_gradient=step)


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
def test_no_recipe_of_a_menu_is_beaten_or_equalled_by_another_in_every_figure(profile, class_index):
    menu = build_menu(profile, class_index, micro_batch=4, accumulation=1)
    figures = [
        (r.seconds, r.persistent_bytes, r.kept_bytes, r.gradient_bytes, r.forward_bytes, r.backward_bytes) for r in menu
    ]
    for one in range(len(menu)):
        for other in range(len(menu)):
            assert one == other or any(a > b for a, b in zip(figures[one], figures[other], strict=True))


def test_the_fastest_uniform_setting_is_in_the_menu_and_recomputed_blocks_come_first(profile):
    menu = build_menu(profile, 1, micro_batch=4, accumulation=1)
    block = profile.classes[1]
    fastest = min(
        section_seconds(profile, 1, SectionPlan(name="", is_block=True, recompute="none", units=units), 4).step_s(1)
        for units in (group_units(block, {o.name: choice for o in block.operators}) for choice in CHOICES)
    )
    assert min(r.seconds for r in menu) <= fastest * (1 + 1e-9)
    recomputed = [r.recompute == "full" for r in menu]
    assert any(recomputed)
    assert recomputed == sorted(recomputed, reverse=True)


# -- the program


def test_the_program_takes_the_fast_recipe_as_often_as_the_kept_bytes_allow():
    slow, fast = recipe(2.0, kept=1, forward=1), recipe(1.0, kept=10, forward=10)
    solution = solve(problem((slow, fast), count=5, fixed_mib=3), budget_bytes=36 * MIB)
    assert solution.counts == ((2, 3),)  # 3 fixed + 2 x 1 + 3 x 10 = 35 MiB
    assert solution.seconds == pytest.approx(7.0)
    assert solution.bound_s == solution.seconds


def test_the_program_counts_what_every_recipe_holds_always():
    slow, fast = recipe(2.0, persistent=1), recipe(1.0, persistent=10)
    assert solve(problem((slow, fast), count=4), budget_bytes=22 * MIB).counts == ((2, 2),)
    assert solve(problem((slow, fast), count=4), budget_bytes=40 * MIB).counts == ((0, 4),)


def test_the_program_counts_what_the_backward_needs_while_it_runs():
    lean, fat = recipe(2.0, kept=4, backward=1), recipe(1.0, kept=4, backward=9)
    assert solve(problem((lean, fat), count=3), budget_bytes=20 * MIB).counts == ((3, 0),)
    assert solve(problem((lean, fat), count=3), budget_bytes=21 * MIB).counts == ((0, 3),)


def test_the_program_counts_gradients_and_the_optimizers_temporaries_at_the_end():
    slow, fast = recipe(2.0, gradient=1), recipe(1.0, gradient=10)
    assert solve(problem((slow, fast), count=2), budget_bytes=11 * MIB).counts == ((1, 1),)
    assert solve(problem((slow, fast), count=2, step=1.0), budget_bytes=11 * MIB).counts == ((2, 0),)


def test_the_program_says_none_where_nothing_fits_and_finds_the_lowest_peak():
    lean, fat = recipe(2.0, persistent=3), recipe(1.0, persistent=10)
    assert solve(problem((lean, fat), count=2), budget_bytes=5 * MIB) is None
    assert leanest(problem((lean, fat), count=2)).counts == ((2, 0),)


def test_an_unknown_solver_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("OSDP_SOLVER", "Gurobi")
    with pytest.raises(SolverError, match=r"solver Gurobi: .* Use one of HiGHS, CBC"):
        solve(problem((recipe(1.0),), count=1), budget_bytes=MIB)


def test_the_solvers_print_nothing(capfd):
    solve(problem((recipe(1.0), recipe(2.0, kept=1)), count=3), budget_bytes=MIB)
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
    assert e.value.holder == "blocks.0.norm_2"  # the one that the MLP's operators were merged into
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


def test_the_table_of_a_plan_shows_decisions_prediction_solver_and_alternatives(profile):
    text = plan(profile, budget_bytes=32 * MIB, global_batch=16, micro_batch=4).table()
    for part in ("known as", "4 ranks x micro-batch 4", "of 32.00 MiB per device", "solver", "ZeRO-3 + full recompute"):
        assert part in text
