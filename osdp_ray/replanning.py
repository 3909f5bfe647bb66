"""Stage 6: telemetry against prediction. `drifted` says whether to plan again, `recalibrate` with what profile.

Re-planning is no second algorithm: the recalibrated profile goes into `plan` again.
"""

import dataclasses
import statistics
from typing import Literal

from osdp_ray.costs import predict
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.records.telemetry import Sample, Telemetry
from osdp_ray.units import format_bytes, format_percent, format_seconds

PEAK_TOLERANCE_FRACTION = 0.01
STEP_TOLERANCE_FRACTION = 0.10
MIN_STEPS = 8  # steps (without the first two of an attempt) before step time counts
WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift:
    """Where a run differs from its plan: `measured` and `predicted` in bytes or seconds, by kind."""

    kind: Literal["over_budget", "peak", "step"]
    measured: float
    predicted: float

    def __str__(self) -> str:
        show = format_seconds if self.kind == "step" else format_bytes
        if self.kind == "over_budget":
            return f"the measured peak {show(self.measured)} exceeds the budget {show(self.predicted)}"
        what = "peak" if self.kind == "peak" else "step"
        return (
            f"the measured {what} {show(self.measured)} differs from the predicted {show(self.predicted)} "
            f"by {format_percent(abs(self.measured / self.predicted - 1))}"
        )


def drifted(plan: Plan, telemetry: Telemetry) -> Drift | None:
    """The first reason to plan again that a plan's own telemetry gives, or None.

    A peak above the budget; a peak more than 1 % from the prediction; once eight steps are there, a median step more
    than 10 % from it.
    """
    peaks = telemetry.peak_bytes_by_rank()
    if peaks:
        measured_bytes, predicted_bytes = max(peaks.values()), plan.prediction.peak_bytes
        device_bytes = measured_device_bytes(plan, telemetry)
        if device_bytes > plan.budget_bytes:
            return Drift(kind="over_budget", measured=device_bytes, predicted=plan.budget_bytes)
        if abs(measured_bytes / predicted_bytes - 1) > PEAK_TOLERANCE_FRACTION:
            return Drift(kind="peak", measured=measured_bytes, predicted=predicted_bytes)
    measured_s = median_step_s(telemetry)
    if measured_s is not None and abs(measured_s / plan.prediction.step_s - 1) > STEP_TOLERANCE_FRACTION:
        return Drift(kind="step", measured=measured_s, predicted=plan.prediction.step_s)
    return None


def recalibrate(profile: Profile, plan: Plan, telemetry: Telemetry) -> Profile:
    """The profile corrected by what a plan measured: the peak's difference, the allocator's reserve, and compute's and
    communication's factor.

    Computing and communicating are not told apart by a step's total, so one factor corrects both; without enough
    steps it stays. Predicting the same plan with the result gives the measured peak and step.
    """
    calibration = profile.calibration
    predicted = predict(profile, plan)
    peaks = telemetry.peak_bytes_by_rank()
    if peaks:
        difference = max(peaks.values()) - predicted.peak_bytes
        reserved = reserved_bytes(telemetry)
        calibration = dataclasses.replace(
            calibration,
            peak_offset_bytes=calibration.peak_offset_bytes + difference,
            reserved_fraction=max(0.0, reserved / max(peaks.values()) - 1) if reserved else 0.0,
        )
    measured_s = median_step_s(telemetry)
    if measured_s is not None:
        optimizer_s = predicted.step_s_by_phase["optimizer"]
        factor = max(0.1, (measured_s - optimizer_s) / max(1e-9, predicted.step_s - optimizer_s))
        calibration = dataclasses.replace(
            calibration,
            compute_factor=calibration.compute_factor * factor,
            communication_factor=calibration.communication_factor * factor,
        )
    return dataclasses.replace(profile, calibration=calibration)


def measured_device_bytes(plan: Plan, telemetry: Telemetry) -> int:
    """What the fullest device held: what was reserved, or the peak where nothing is reserved, and what lies beside."""
    beside = plan.prediction.held_beside
    tensors = max(reserved_bytes(telemetry), *telemetry.peak_bytes_by_rank().values())
    return tensors + sum(num_bytes for name, num_bytes in beside.items() if name != "allocator")


def reserved_bytes(telemetry: Telemetry) -> int:
    """The most that a rank's caching allocator reserved, 0 where there is none."""
    return max((sample.reserved_bytes or 0 for sample in telemetry.samples), default=0)


def median_step_s(telemetry: Telemetry) -> float | None:
    """The median over steps of the slowest rank's seconds, sampled and warm-up steps apart; None below MIN_STEPS."""
    if not telemetry.samples:
        return None
    first = min(sample.step for sample in telemetry.samples)
    slowest: dict[int, float] = {}
    for sample in telemetry.samples:
        if sample.step >= first + WARM_UP_STEPS and not _is_disturbed(sample):
            slowest[sample.step] = max(slowest.get(sample.step, 0.0), sample.step_s)
    return statistics.median(slowest.values()) if len(slowest) >= MIN_STEPS else None


def _is_disturbed(sample: Sample) -> bool:
    """On CPU a step that records allocator events is slower than the others."""
    return sample.peak_bytes is not None and sample.reserved_bytes is None
