"""The planner against enumeration, uniform settings and more memory, on random small profiles without torch.

`NUM_INSTANCES` are sampled here; `benchmarks/planner.py` holds `NUM_ENUMERATED` against enumeration.
"""

import itertools
import random

import pytest

from osdp_ray.costs import predict, predict_sections, simulate_sections
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning import plan
from osdp_ray.planning.choices import CHOICES, RECOMPUTES, uniform_sections
from osdp_ray.units import MIB
from tests.enumeration import faster_plan_that_fits, fits, lowest_peak_bytes, random_instance, random_split_instance
from tests.random_profiles import random_profile

NUM_INSTANCES = 6
NUM_SEEDS = 6
SLACK_FRACTION = 1e-6


def uniform_predictions(profile, shapes):
    for choice, recompute, (micro_batch, accumulation) in itertools.product(CHOICES, RECOMPUTES, shapes):
        sections = uniform_sections(profile, choice, recompute)
        yield predict_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation)


@pytest.mark.parametrize("draw", [random_instance, random_split_instance], ids=["whole", "split"])
@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_no_plan_of_all_that_fit_is_faster_with_every_option_and_overlap(draw, seed):
    instance = draw(seed)

    made = plan(instance.profile, **instance.wishes)

    assert fits(instance, made.sections, made.synchronise)
    faster_s = faster_plan_that_fits(instance, made.prediction.step_s)
    assert faster_s is None, f"{made.solver.status}: {made.prediction.step_s} s a step, and {faster_s} s is possible"
    assert made.solver.status == "optimal"
    assert made.solver.gap_fraction == 0.0


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_plan_fits_by_the_simulator_and_no_uniform_setting_that_fits_is_faster(seed):
    rng = random.Random(1000 + seed)
    profile = random_profile(rng, max_layers=4, merge=rng.random() < 0.7)
    per_rank = rng.choice((2, 4))
    shapes = [(size, per_rank // size) for size in range(1, per_rank + 1) if per_rank % size == 0]
    uniform = list(uniform_predictions(profile, shapes))
    lean, fat = min(p.peak_bytes for p in uniform), max(p.peak_bytes for p in uniform)
    last = None
    for fraction in sorted((0.0, rng.random(), 1.0)):
        budget_bytes = lean + round(fraction * (fat - lean))

        made = plan(profile, budget_bytes=budget_bytes, global_batch=per_rank * profile.num_ranks)

        held = simulate_sections(
            profile,
            made.sections,
            micro_batch=made.micro_batch,
            accumulation=made.accumulation,
            synchronise=made.synchronise,
        )
        assert held.peak_bytes == max(made.prediction.peak_by_phase[phase] for phase in held.peak_by_phase)
        assert made.prediction.peak_bytes == held.peak_bytes <= budget_bytes
        assert predict(profile, made) == made.prediction
        assert made.global_batch == made.micro_batch * made.accumulation * profile.num_ranks
        per_s = made.prediction.samples_per_s * (1 + SLACK_FRACTION)
        assert per_s >= max(p.samples_per_s for p in uniform if p.peak_bytes <= budget_bytes)
        assert last is None or per_s >= last, f"{budget_bytes} bytes are slower than less memory"
        last = made.prediction.samples_per_s


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_free_batches_and_nodes_as_groups_never_make_a_plan_slower(seed, monkeypatch):
    instance = random_instance(3 * seed + 1)  # on nodes

    smaller = plan(instance.profile, **instance.wishes)
    larger = plan(instance.profile, **instance.wishes | {"micro_batch": None})
    monkeypatch.setattr("osdp_ray.planning.menus.choices_of", lambda _: CHOICES)
    without_nodes = plan(_again(instance.profile), **instance.wishes)

    assert larger.prediction.samples_per_s >= smaller.prediction.samples_per_s * (1 - SLACK_FRACTION)
    assert smaller.prediction.samples_per_s >= without_nodes.prediction.samples_per_s * (1 - SLACK_FRACTION)


def _again(profile):
    """The same profile as another object, for which nothing is kept yet."""
    return type(profile).from_json(profile.to_json())


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 2))
def test_the_budget_that_an_error_names_works_and_is_within_one_per_cent_of_the_leanest_of_all_plans(seed):
    instance = random_instance(301 + 3 * seed)
    with pytest.raises(InfeasibleError) as caught:
        plan(instance.profile, **instance.wishes | {"budget_bytes": MIB})
    named_bytes = caught.value.leanest_bytes

    made = plan(instance.profile, **instance.wishes | {"budget_bytes": named_bytes})

    assert made.prediction.peak_bytes <= named_bytes
    assert named_bytes <= lowest_peak_bytes(instance) * 1.01


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 3))
def test_both_solvers_find_plans_as_fast_as_each_other_and_the_same_again(seed, monkeypatch):
    instance = random_instance(400 + seed)
    found = {}
    for solver in ("HiGHS", "CBC", "HiGHS"):
        monkeypatch.setenv("OSDP_SOLVER", solver)
        made = plan(_again(instance.profile), **instance.wishes)
        assert made.solver.solver in (solver, "none needed")
        assert solver not in found or made.to_json() == found[solver].to_json()
        found[solver] = made
    seconds = [made.prediction.step_s for made in found.values()]
    assert seconds[0] == pytest.approx(seconds[1], rel=SLACK_FRACTION)
