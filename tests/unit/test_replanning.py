"""Telemetry against prediction: when to plan again, and with what profile."""

import dataclasses

import pytest

from osdp_ray.costs import predict
from osdp_ray.planning import plan
from osdp_ray.records.telemetry import Sample, Telemetry
from osdp_ray.replanning import MIN_STEPS, drifted, median_step_s, recalibrate
from osdp_ray.units import MIB
from tests.random_profiles import base_profile


@pytest.fixture(scope="module")
def profile():
    return base_profile()


@pytest.fixture(scope="module")
def made(profile):
    return plan(profile, budget_bytes=32 * MIB, global_batch=16, micro_batch=4)


def sample(rank, step, *, step_s=1.0, peak_bytes=None, reserved_bytes=None):
    return Sample(
        plan_index=0,
        rank=rank,
        step=step,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=1e-3,
        num_samples=4,
        step_s=step_s,
        data_s=0.0,
        forward_s=0.3,
        backward_s=0.6,
        optimizer_s=0.1,
        peak_bytes=peak_bytes,
        persistent_bytes=0,
        reserved_bytes=reserved_bytes,
        resident_bytes=0,
        num_retries=0,
    )


def telemetry(step_s, *, peak_bytes=None, num_steps=12, first=0):
    """Two ranks, the second the slower by 1 %; every fifth step has a peak and is disturbed by measuring it."""
    samples = []
    for step in range(first, first + num_steps):
        measured = peak_bytes is not None and step % 5 == 0
        for rank in range(2):
            seconds = step_s * (10.0 if measured or step < first + 2 else 0.99 + 0.01 * rank)
            samples.append(sample(rank, step, step_s=seconds, peak_bytes=peak_bytes if measured else None))
    return Telemetry(samples=tuple(samples))


def test_the_step_is_the_median_of_the_slowest_rank_without_warm_up_and_disturbed_steps():
    assert median_step_s(telemetry(2.0, peak_bytes=5, num_steps=20)) == pytest.approx(2.0)
    assert median_step_s(telemetry(2.0, first=40)) == pytest.approx(2.0)


def test_a_gpus_sampled_steps_are_not_disturbed():
    samples = tuple(sample(0, step, step_s=3.0, peak_bytes=7, reserved_bytes=8) for step in range(2 + MIN_STEPS))
    assert median_step_s(Telemetry(samples=samples)) == 3.0


def test_too_few_steps_say_nothing_about_time():
    assert median_step_s(telemetry(2.0, num_steps=1 + MIN_STEPS)) is None
    assert median_step_s(telemetry(2.0, num_steps=2 + MIN_STEPS)) == pytest.approx(2.0)
    assert median_step_s(Telemetry(samples=())) is None


def test_what_goes_as_predicted_has_not_drifted(made):
    prediction = made.prediction
    assert drifted(made, telemetry(prediction.step_s * 1.09, peak_bytes=round(prediction.peak_bytes * 1.009))) is None
    assert drifted(made, telemetry(prediction.step_s * 0.91, peak_bytes=round(prediction.peak_bytes * 0.991))) is None
    assert drifted(made, Telemetry(samples=())) is None


@pytest.mark.parametrize(
    ("peak_fraction", "step_fraction", "kind", "text"),
    [
        (1.02, 1.0, "over_budget", "exceeds the budget 32.00 MiB"),
        (0.98, 1.0, "peak", "differs from the predicted"),
        (1.0, 1.12, "step", "differs from the predicted"),
        (1.0, 0.88, "step", "differs from the predicted"),
        (0.98, 2.0, "peak", "the measured peak"),
    ],
)
def test_what_differs_is_named_the_budget_first_then_the_peak_then_the_step(
    made, peak_fraction, step_fraction, kind, text
):
    tight = made.budget_bytes if kind == "over_budget" else made.prediction.peak_bytes
    drift = drifted(made, telemetry(made.prediction.step_s * step_fraction, peak_bytes=round(tight * peak_fraction)))
    assert drift.kind == kind
    assert text in str(drift)


def test_predicting_the_same_plan_with_the_recalibrated_profile_gives_what_was_measured(profile, made):
    measured = telemetry(made.prediction.step_s * 1.5, peak_bytes=made.prediction.peak_bytes + 3 * MIB)

    once = recalibrate(profile, made, measured)
    twice = recalibrate(once, made, measured)

    for taught in (once, twice):
        prediction = predict(taught, made)
        assert prediction.peak_bytes == made.prediction.peak_bytes + 3 * MIB
        assert prediction.step_s == pytest.approx(made.prediction.step_s * 1.5, rel=1e-9)
    assert once.calibration.compute_factor == once.calibration.communication_factor > 1


def test_peaks_alone_leave_the_factors_and_nothing_leaves_everything(profile, made):
    short = telemetry(9.0, peak_bytes=made.prediction.peak_bytes - MIB, num_steps=4)
    assert recalibrate(profile, made, short).calibration == dataclasses.replace(
        profile.calibration, peak_offset_bytes=-MIB
    )
    assert recalibrate(profile, made, Telemetry(samples=())) == profile


def test_the_recalibrated_profile_plans_for_what_is_left(profile, made):
    taught = recalibrate(profile, made, telemetry(1.0, peak_bytes=made.prediction.peak_bytes + 4 * MIB, num_steps=4))

    again = plan(taught, budget_bytes=made.budget_bytes, global_batch=16, micro_batch=4)

    assert again.prediction.peak_bytes <= made.budget_bytes
    assert predict(profile, again).peak_bytes <= made.budget_bytes - 4 * MIB
