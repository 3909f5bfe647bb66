"""The uniform settings that a plan is measured against: DP, ZeRO-2, ZeRO-3, HSDP, each with and without recompute."""

from osdp_ray.costs import simulate_sections, step_seconds
from osdp_ray.planning.choices import DP, HSDP, RECOMPUTES, ZERO2, ZERO3, choices_of, uniform_sections
from osdp_ray.planning.menus import StepShape
from osdp_ray.planning.search import Candidate, as_words, bytes_words, candidate
from osdp_ray.records.plan import Alternative, Choice
from osdp_ray.records.profile import Profile, Recompute

_SETTINGS = {"DP": DP, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3, "HSDP": HSDP}


def uniform_plans(
    profile: Profile, shapes: list[StepShape], budget_bytes: int
) -> list[tuple[Alternative, Candidate | None]]:
    """Every setting that the cluster offers, at its own best shape."""
    offered = choices_of(profile)
    return [
        _uniform(profile, name, choice, recompute, shapes, budget_bytes)
        for name, choice in _SETTINGS.items()
        if choice in offered
        for recompute in RECOMPUTES
    ]


def _uniform(
    profile: Profile, name: str, choice: Choice, recompute: Recompute, shapes: list[StepShape], budget_bytes: int
) -> tuple[Alternative, Candidate | None]:
    """A setting at the fastest of its shapes that fits; the lowest peak where none does."""
    sections = uniform_sections(profile, choice, recompute)

    def speed(shape: StepShape) -> float:
        step_s = sum(step_seconds(profile, sections, **as_words(shape)).values())
        return shape.micro_batch * shape.accumulation / step_s

    def peak(shape: StepShape) -> int:
        return simulate_sections(profile, sections, **bytes_words(shape), with_levels=False).peak_bytes

    best: Candidate | None = None
    for shape in sorted(shapes, key=lambda shape: -speed(shape)):
        if peak(shape) <= budget_bytes:
            best = candidate(profile, sections, shape)
            break
    label = name if recompute == "none" else f"{name} + {recompute} recompute"
    alternative = Alternative(
        name=label,
        micro_batch=best.shape.micro_batch if best else None,
        peak_bytes=best.prediction.peak_bytes if best else min(peak(shape) for shape in shapes[:1]),
        step_s=best.prediction.step_s if best else None,
        samples_per_s=best.samples_per_s if best else None,
    )
    return alternative, best
