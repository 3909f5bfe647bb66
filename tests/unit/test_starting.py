"""The peaks before the first step bind plans as those of a step do."""

import dataclasses

import pytest

from osdp_ray.costs import chunk_rows, predict
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning import plan
from osdp_ray.units import MIB
from tests.random_profiles import base_profile

GLOBAL_BATCH = 16


def profile_that_draws(scratch_bytes):
    """The golden profile with one parameter whose values are drawn whole, beside that many bytes."""
    profile = base_profile()
    stem = profile.classes[0]
    first, *others = stem.parameters
    parameters = (dataclasses.replace(first, scratch_bytes=scratch_bytes), *others)
    classes = (dataclasses.replace(stem, parameters=parameters), *profile.classes[1:])
    return dataclasses.replace(profile, classes=classes)


def test_a_chunk_is_whole_rows_of_about_a_quarter_of_a_million_elements():
    assert chunk_rows((50_000, 1024)) == 256
    assert chunk_rows((10,)) == 1 << 18
    assert chunk_rows((4, 1 << 20)) == 1
    assert chunk_rows((7, 3, 2, 2)) == (1 << 18) // 12


def test_a_start_that_holds_more_than_a_step_makes_the_plan_leaner():
    budget_bytes = 32 * MIB
    easy = plan(profile_that_draws(0), budget_bytes=budget_bytes, global_batch=GLOBAL_BATCH)
    beside = budget_bytes - easy.prediction.peak_by_phase["building"] + 8 * 1024

    hard_profile = profile_that_draws(beside)
    hard = plan(hard_profile, budget_bytes=budget_bytes, global_batch=GLOBAL_BATCH)

    assert predict(hard_profile, dataclasses.replace(easy)).peak_by_phase["building"] > budget_bytes
    assert hard.prediction.peak_by_phase["building"] <= hard.prediction.peak_bytes <= budget_bytes


def test_a_start_that_no_plan_can_hold_is_refused_with_the_budget_that_it_needs():
    profile = profile_that_draws(64 * MIB)
    with pytest.raises(InfeasibleError, match=r"in the building phase, .*Raise --memory-budget") as error:
        plan(profile, budget_bytes=32 * MIB, global_batch=GLOBAL_BATCH)
    enough = plan(profile, budget_bytes=error.value.leanest_bytes, global_batch=GLOBAL_BATCH)
    assert enough.prediction.peak_bytes <= error.value.leanest_bytes
