"""Explanations and differences of plans."""

import dataclasses

import pytest

from osdp_ray.cli import main
from osdp_ray.costs import predict_sections
from osdp_ray.planning import plan
from osdp_ray.planning.difference import difference_table, differences
from osdp_ray.planning.explain import explain, floors
from osdp_ray.planning.explain_table import explanation_table
from osdp_ray.planning.menus import StepShape
from osdp_ray.units import MIB
from tests.random_profiles import base_profile

BATCH = {"global_batch": 16, "micro_batch": 4}


@pytest.fixture(scope="module")
def profile():
    return base_profile()


@pytest.fixture(scope="module")
def made(profile):
    return plan(profile, budget_bytes=24 * MIB, **BATCH)


def test_every_section_and_decision_has_a_reason_and_its_figures_are_the_simulators(profile, made):
    explanation = explain(profile, made)
    first = explanation.reasons[0]
    assert sum(r.num_sections for r in explanation.reasons if r.subject == "activations") == 4
    assert all(reason.next_best is None or reason.next_best.fits for reason in explanation.reasons)
    assert all(reason.wanted is None or reason.wanted.more_s < 0 for reason in explanation.reasons)
    units = tuple(dataclasses.replace(unit) for unit in made.sections[0].units)
    same = (dataclasses.replace(made.sections[0], units=units), *made.sections[1:])
    again = predict_sections(profile, same, micro_batch=4, accumulation=1)
    assert (again.step_s, again.peak_bytes) == (made.prediction.step_s, made.prediction.peak_bytes)
    assert first.sections == "stem"
    assert first.decision in ("DP", "ZeRO-2", "ZeRO-3")


def test_no_next_best_that_fits_is_faster_by_more_than_the_gap_that_the_plan_states(profile, made):
    for reason in explain(profile, made).reasons:
        allowed_s = (made.solver.gap_fraction + 1e-6) * made.prediction.step_s
        assert reason.next_best is None or reason.next_best.more_s >= -allowed_s


def test_what_binds_is_named_and_more_memory_has_a_price(profile, made):
    explanation = explain(profile, made)
    assert made.prediction.peak_by_phase[explanation.binding_phase] == made.prediction.peak_bytes
    assert explanation.free_bytes == made.budget_bytes - made.prediction.device_bytes
    assert explanation.binding_resource in ("compute", "link", "both")
    richer = plan(profile, budget_bytes=made.budget_bytes + explanation.more_memory_bytes, global_batch=16)
    assert explanation.saved_s == pytest.approx(made.prediction.step_s - richer.prediction.step_s)
    assert explanation.saved_s > 0


def test_no_plan_is_below_the_floor(profile, made):
    compute_s, link_s, _ = floors(profile, StepShape(micro_batch=4, accumulation=1))
    explanation = explain(profile, made)
    assert explanation.floor_s == compute_s + link_s  # this profile's backend takes turns
    assert explanation.floor_s <= made.prediction.step_s
    beside = dataclasses.replace(profile, overlaps=True)
    other = plan(beside, budget_bytes=24 * MIB, **BATCH)
    assert explain(beside, other).floor_s == max(compute_s, link_s) <= other.prediction.step_s


def test_the_table_shows_reasons_what_binds_the_price_the_floor_and_the_proof(profile, made):
    text = explanation_table(made, explain(profile, made))
    for part in ("next best", "activations", "stay free", "ms per GiB", "no plan of this batch", "proven:", "ZeRO-3"):
        assert part in text


def test_equal_plans_do_not_differ_and_others_do_in_words_and_figures(profile, made):
    assert differences(made, made) == ()
    assert difference_table(()) == "the plans are the same"
    other = plan(profile, budget_bytes=16 * MIB, **BATCH)
    found = {difference.what: difference for difference in differences(made, other)}
    assert found["budget"].change == "-8.00 MiB"
    assert found["predicted samples/s"].change.startswith("-")
    assert any(difference.change.endswith(("section", "sections")) for difference in found.values())


def test_the_command_explains_with_and_without_a_profile_and_shows_differences(profile, made, tmp_path, capsys):
    made.save(tmp_path / "plan.json")
    profile.save(tmp_path / "profile.json")
    path, other = str(tmp_path / "plan.json"), str(tmp_path / "other.json")
    plan(profile, budget_bytes=16 * MIB, **BATCH).save(other)
    for arguments, part in (
        (["explain", path], "Give --profile"),
        (["explain", path, "--profile", str(tmp_path / "profile.json")], "next best that fits"),
        (["explain", path, "--profile", str(tmp_path / "profile.json"), "--memory"], "held always"),
        (["explain", path, "--profile", str(tmp_path / "profile.json"), "--json"], '"saved_s"'),
        (["diff", path, other], "predicted step"),
        (["diff", path, other, "--json"], '"before"'),
    ):
        assert main(arguments) == 0
        assert part in capsys.readouterr().out


def test_a_plan_is_not_explained_by_another_profile_and_memory_needs_one(profile, made, tmp_path, capsys):
    made.save(tmp_path / "plan.json")
    assert main(["explain", str(tmp_path / "plan.json"), "--memory"]) == 2
    assert "Give --profile" in capsys.readouterr().err
    for field, value, part in (("workload_hash", "f" * 16, "workload"), ("ranks_per_node", (8,), "ranks")):
        dataclasses.replace(profile, **{field: value}).save(tmp_path / "other.json")
        assert main(["explain", str(tmp_path / "plan.json"), "--profile", str(tmp_path / "other.json")]) == 2
        assert f"made for {part}" in capsys.readouterr().err
