"""What the benchmarks on the test bed count and compare; nothing is started here."""

import json

import pytest
from step_time import kendall_tau, plans
from trials import Kept, blocks_in_turn, collectives_of, plan_of, predicted_link_s, uniform

from osdp_ray.costs import step_seconds
from osdp_ray.planning.choices import DP, ZERO2, ZERO3
from osdp_ray.records.profile import Profile
from tests.regenerate_golden import PROFILE


@pytest.fixture(scope="module")
def profile():
    return Profile.load(PROFILE)


@pytest.mark.parametrize(("choice", "accumulation"), [(DP, 1), (ZERO2, 2), (ZERO3, 1), (ZERO3, 3)])
def test_the_collectives_of_a_plan_are_those_that_its_prediction_counts(profile, choice, accumulation):
    plan = plan_of(profile, uniform(profile, choice), micro_batch=2, accumulation=accumulation)
    calls = collectives_of(profile, plan)

    free = {
        **profile.to_json(),
        "links": [{**link, "latency_s": 0.0, "bytes_per_s": 1e300} for link in profile.to_json()["links"]],
    }
    parts = [
        sum(step_seconds(of, plan.sections, micro_batch=2, accumulation=accumulation).values())
        for of in (profile, Profile.from_json(free))
    ]

    assert {name for _, name, _ in calls} == ({"all_reduce"} if choice is DP else {"all_gather", "reduce_scatter"})
    assert predicted_link_s(profile, calls) == pytest.approx(parts[0] - parts[1], rel=1e-9)


def test_sections_take_choices_in_turn(profile):
    sections = blocks_in_turn(profile, [ZERO3, DP], ["none", "full"])
    assert [section.name for section in sections] == [section.name for section in profile.sections]
    assert [section.units[0].choice for section in sections[:4]] == [ZERO3, DP, ZERO3, DP]
    assert {section.recompute for section in sections if section.is_block} == {"none", "full"}


def test_enough_plans_are_compared(profile):
    with_nodes = {**profile.to_json(), "ranks_per_node": [2, 2]}
    with_nodes["links"] = [
        {**link, "group": kind} for kind in ("world", "node", "across") for link in with_nodes["links"]
    ]
    found = plans(Profile.from_json(with_nodes), is_quick=False)
    assert len(found) >= 24
    assert len({plan.decisions for plan in found.values()}) == len(found)


def test_kendalls_tau_counts_pairs_in_order():
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [40, 30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)


def test_what_was_measured_is_not_measured_again(tmp_path):
    path = tmp_path / "kept.json"
    assert Kept(path, is_fresh=False).get("one", lambda: [1]) == [1]
    assert Kept(path, is_fresh=False).get("one", lambda: [2]) == [1]
    assert Kept(path, is_fresh=True).get("one", lambda: [3]) == [3]
    assert json.loads(path.read_text()) == {"one": [3]}
