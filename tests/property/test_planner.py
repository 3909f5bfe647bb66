"""The planner against enumeration, uniform settings and more memory, on random small profiles without torch."""

import itertools
import random

import pytest

from osdp_ray.costs import predict, predict_sections, simulate_sections
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning import plan
from osdp_ray.planning.menus import CHOICES, RECOMPUTES, build_menu, group_units, uniform_sections
from osdp_ray.planning.solve import Problem, solve
from osdp_ray.records.plan import SectionPlan
from osdp_ray.units import MIB
from tests.random_profiles import random_profile

NUM_SEEDS = 10
SLACK_FRACTION = 1e-9


def ways(section_class, name):
    """Every choice of every operator with every way to recompute, dominated ones too."""
    names = [operator.name for operator in section_class.operators]
    found = []
    for combination in itertools.product(CHOICES, repeat=len(names)):
        units = group_units(section_class, dict(zip(names, combination, strict=True)))
        for recompute in RECOMPUTES if section_class.is_block else RECOMPUTES[:1]:
            found.append(SectionPlan(name=name, is_block=section_class.is_block, recompute=recompute, units=units))
    return found


def every_plan(profile, *, micro_batch, accumulation):
    """(peak bytes, step seconds) of every assignment of decisions to sections."""
    menus = [ways(profile.classes[section.class_index], section.name) for section in profile.sections]
    found = []
    for sections in itertools.product(*menus):
        prediction = predict_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation)
        found.append((prediction.peak_bytes, prediction.step_s))
    return found


def uniform_predictions(profile, shapes):
    for choice, recompute, (micro_batch, accumulation) in itertools.product(CHOICES, RECOMPUTES, shapes):
        sections = uniform_sections(profile, choice, recompute)
        yield predict_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_plan_is_as_fast_as_the_fastest_of_all_assignments_or_within_its_gap(seed):
    rng = random.Random(seed)
    profile = random_profile(rng, max_layers=2, merge=True)
    micro_batch, accumulation = rng.choice((1, 2, 4)), rng.choice((1, 2))
    plans = every_plan(profile, micro_batch=micro_batch, accumulation=accumulation)
    lean, fat = min(peak for peak, _ in plans), max(peak for peak, _ in plans)
    for fraction in (0.05 + rng.random() * 0.3, rng.random()):
        budget_bytes = lean + round(fraction * (fat - lean))
        fastest_s = min(step_s for peak, step_s in plans if peak <= budget_bytes)

        made = plan(
            profile,
            budget_bytes=budget_bytes,
            global_batch=micro_batch * accumulation * profile.num_ranks,
            micro_batch=micro_batch,
        )

        assert made.prediction.peak_bytes <= budget_bytes
        allowed = 1 + made.solver.gap_fraction
        assert fastest_s <= made.prediction.step_s * (1 + 1e-6), "the enumeration missed a plan"
        assert made.prediction.step_s <= fastest_s * allowed * (1 + 1e-6), (
            f"{made.solver.status} at {fraction:.3f} of {lean}..{fat} bytes: {made.prediction.step_s} s a step, "
            f"and {fastest_s} s is possible"
        )
        assert (made.solver.status == "optimal") == (made.solver.gap_fraction == 0.0)


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_a_plan_fits_by_the_simulator_and_no_uniform_setting_that_fits_is_faster(seed):
    rng = random.Random(1000 + seed)
    profile = random_profile(rng, max_layers=4, merge=rng.random() < 0.7)
    per_rank = rng.choice((2, 4))
    shapes = [(size, per_rank // size) for size in range(1, per_rank + 1) if per_rank % size == 0]
    uniform = list(uniform_predictions(profile, shapes))
    lean, fat = min(p.peak_bytes for p in uniform), max(p.peak_bytes for p in uniform)
    last = None
    for fraction in sorted((0.0, rng.random(), rng.random(), 1.0)):
        budget_bytes = lean + round(fraction * (fat - lean))

        made = plan(profile, budget_bytes=budget_bytes, global_batch=per_rank * profile.num_ranks)

        held = simulate_sections(profile, made.sections, micro_batch=made.micro_batch, accumulation=made.accumulation)
        assert held.peak_bytes == made.prediction.peak_bytes <= budget_bytes
        assert predict(profile, made) == made.prediction
        assert made.global_batch == made.micro_batch * made.accumulation * profile.num_ranks
        per_s = made.prediction.samples_per_s * (1 + SLACK_FRACTION)
        assert per_s >= max(p.samples_per_s for p in uniform if p.peak_bytes <= budget_bytes)
        assert last is None or per_s >= last, f"{budget_bytes} bytes are slower than less memory"
        last = made.prediction.samples_per_s


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 4))
def test_a_budget_below_the_leanest_plan_is_refused_with_one_that_works(seed):
    rng = random.Random(2000 + seed)
    profile = random_profile(rng, max_layers=3, merge=True)
    batch = {"global_batch": profile.num_ranks, "micro_batch": 1}
    with pytest.raises(InfeasibleError) as caught:
        plan(profile, budget_bytes=MIB, **batch)

    made = plan(profile, budget_bytes=caught.value.leanest_bytes, **batch)

    assert made.prediction.peak_bytes <= caught.value.leanest_bytes


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 4))
def test_both_solvers_find_programs_as_fast_as_each_other(seed, monkeypatch):
    rng = random.Random(3000 + seed)
    profile = random_profile(rng, max_layers=4, merge=True)
    menus = tuple(build_menu(profile, c, micro_batch=2, accumulation=1) for c in range(len(profile.classes)))
    counts = tuple(sum(section.class_index == c for section in profile.sections) for c in range(len(menus)))
    program = Problem(menus=menus, counts=counts, fixed_bytes=0, step_bytes_per_gradient=0.0)
    peaks = [prediction.peak_bytes for prediction in uniform_predictions(profile, [(2, 1)])]
    for fraction in (0.25, rng.random()):
        budget_bytes = min(peaks) + round(fraction * (max(peaks) - min(peaks)))
        found = {}
        for solver in ("HiGHS", "CBC"):
            monkeypatch.setenv("OSDP_SOLVER", solver)
            found[solver] = solve(program, budget_bytes=budget_bytes)
        assert {name: solution.solver for name, solution in found.items()} == {"HiGHS": "HiGHS", "CBC": "CBC"}
        assert found["HiGHS"].seconds == pytest.approx(found["CBC"].seconds, rel=1e-6)
