"""Plans for a fixed profile stay what they are until someone means to change them."""

import json

import pytest

from osdp_ray.records.profile import Profile
from tests.regenerate_golden import BUDGETS_MIB, PROFILE, golden_path, golden_plan, what_is_golden


@pytest.fixture(scope="module")
def profile():
    return Profile.load(PROFILE)


@pytest.mark.parametrize("budget_mib", BUDGETS_MIB)
def test_the_plan_of_a_fixed_profile_is_the_golden_one(profile, budget_mib):
    expected = json.loads(golden_path(budget_mib).read_text(encoding="utf-8"))

    found = json.loads(json.dumps(what_is_golden(golden_plan(profile, budget_mib))))

    if found != expected:
        keys = [key for key in expected if found.get(key) != expected[key]]
        pytest.fail(
            f"the plan for {budget_mib} MiB differs from {golden_path(budget_mib).name} in {', '.join(keys)}: "
            f"{[found.get(key) for key in keys]} instead of {[expected[key] for key in keys]}. If the change of policy "
            "is meant, rewrite the files by `python -m tests.regenerate_golden` and commit them with it."
        )


def test_golden_plans_differ_from_budget_to_budget(profile):
    sections = {json.dumps(json.loads(golden_path(budget).read_text())["sections"]) for budget in BUDGETS_MIB}
    assert len(sections) == len(BUDGETS_MIB)
