"""Options of a step: how far units are gathered ahead, and the group that reduces."""

import dataclasses
import random

import pytest

from osdp_ray.costs import held_beside, predict, simulate_sections, step_seconds, tensor_budget_bytes
from osdp_ray.errors import PlanMismatchError, UsageError
from osdp_ray.execution import TrainOptions, execute
from osdp_ray.planning import plan
from osdp_ray.planning.choices import DP, ZERO3, uniform_sections
from osdp_ray.records.plan import Plan
from osdp_ray.units import MIB
from tests.fake_run import Tiny, World, run
from tests.fake_run import make_plan as planned
from tests.random_profiles import base_profile, random_profile

SHAPE = {"micro_batch": 2, "accumulation": 1}


def overlapping(profile):
    return dataclasses.replace(profile, overlaps=True)


def test_units_are_gathered_ahead_only_where_that_hides_something():
    profile = base_profile()
    assert plan(profile, budget_bytes=64 * MIB).prefetch == 0
    assert plan(overlapping(profile), budget_bytes=64 * MIB).prefetch == 1
    assert plan(profile, budget_bytes=64 * MIB, prefetch=2).prefetch == 2


@pytest.mark.parametrize(("prefetch", "overlaps"), [(-1, False), (4, False), (0, True), (4, True)])
def test_a_prefetch_that_cannot_be_is_an_error_with_what_can(prefetch, overlaps):
    profile = overlapping(base_profile()) if overlaps else base_profile()
    with pytest.raises(UsageError, match=rf"prefetch of {prefetch} units is not between {int(overlaps)} and 3"):
        plan(profile, budget_bytes=64 * MIB, prefetch=prefetch)


@pytest.mark.parametrize("seed", range(4))
def test_every_unit_ahead_holds_more_and_without_overlap_no_time_is_lost_by_none(seed):
    profile = random_profile(random.Random(seed), max_layers=4, merge=True)
    profile = dataclasses.replace(profile, overlaps=False, backend="gloo")
    sections = uniform_sections(profile, ZERO3, "full")
    peaks = [simulate_sections(profile, sections, **SHAPE, prefetch=n).peak_by_phase["backward"] for n in range(4)]
    seconds = [step_seconds(profile, sections, **SHAPE, prefetch=n) for n in range(4)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[3]
    assert seconds[0] == seconds[1] == seconds[3]


def test_nothing_is_gathered_ahead_where_everything_is_replicated():
    profile = base_profile()
    sections = uniform_sections(profile, DP, "none")
    kept = [simulate_sections(profile, sections, **SHAPE, prefetch=n).peak_by_phase["optimizer"] for n in range(4)]
    assert len(set(kept)) == 1


def test_a_group_of_its_own_costs_a_communicator_and_takes_no_longer():
    profile = dataclasses.replace(overlapping(base_profile()), communicator_bytes=5 * MIB)
    sections = uniform_sections(profile, ZERO3, "none")
    shared, own = (sum(step_seconds(profile, sections, **SHAPE, scatter_group=g).values()) for g in ("shared", "own"))
    assert own <= shared
    assert held_beside(profile, 1, "own")["communicators"] == 10 * MIB
    assert tensor_budget_bytes(profile, 64 * MIB) - tensor_budget_bytes(profile, 64 * MIB, "own") == 5 * MIB
    made = plan(profile, budget_bytes=64 * MIB, scatter_group="own")
    assert made.scatter_group == "own"
    assert made.prediction == predict(profile, made)
    assert made.prediction.held_beside["communicators"] == 10 * MIB


def test_a_plan_of_before_there_were_options_ran_as_fsdp2_does():
    made = plan(base_profile(), budget_bytes=64 * MIB)
    fields = made.to_json()
    del fields["prefetch"], fields["scatter_group"]
    earlier = Plan.from_json(fields)
    assert (earlier.prefetch, earlier.scatter_group) == (1, "shared")
    assert earlier.decisions != made.decisions


def test_a_run_keeps_to_the_options_that_it_was_given(world, tmp_path):
    run(world, tmp_path, prefetch=2, scatter_group="own")
    made = Plan.load(tmp_path / "plan-0.json")
    assert (made.prefetch, made.scatter_group) == (2, "own")


@pytest.mark.parametrize("change", [{"workload_hash": "other"}, {"ranks_per_node": (4, 4)}])
def test_a_plan_of_another_workload_or_cluster_is_not_executed(change, tmp_path):
    world, workload = World(), Tiny()
    cluster = world.discover(num_workers=2)
    made = dataclasses.replace(planned(world.profile(workload, cluster)), **change)
    (wanted,) = change.values()
    shown = wanted if isinstance(wanted, str) else r"4 \+ 4"
    with pytest.raises(PlanMismatchError, match=rf"was made for .* {shown}, and here it is"):
        execute(workload, made, cluster, options=TrainOptions(num_steps=1), run_dir=tmp_path, hub=None)
