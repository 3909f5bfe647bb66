"""What a decision costs: bytes by lifetime, seconds by phase. Pure Python; the planner, the report and the checks of a
run all ask here.
"""

import dataclasses

from osdp_ray.costs.device import held_beside, tensor_budget_bytes
from osdp_ray.costs.ledger import Holding, PhasePeak, explain_peaks, explain_section_peaks, peak_table
from osdp_ray.costs.levels import PassBytes, SectionBytes, StepBytes
from osdp_ray.costs.memory import StepSimulator
from osdp_ray.costs.programs import Table, table_of
from osdp_ray.costs.seconds import SectionSeconds, UnitSeconds, section_seconds, unit_seconds
from osdp_ray.costs.splitting import Splits, divides, split_class, splits_of, splittable
from osdp_ray.costs.starting import SAVE_PIECE_BYTES, chunk_rows
from osdp_ray.costs.steps import evaluation_bytes, num_rounds, simulate_bytes, simulate_sections, unit_state_bytes
from osdp_ray.costs.streams import beside, late_s, overlapped_s, step_seconds
from osdp_ray.costs.units import WEIGHTLESS, UnitBytes
from osdp_ray.records.plan import Plan, Prediction, ScatterGroup, SectionPlan, Synchronise
from osdp_ray.records.profile import Profile

__all__ = [
    "SAVE_PIECE_BYTES",
    "WEIGHTLESS",
    "Holding",
    "PassBytes",
    "PhasePeak",
    "SectionBytes",
    "SectionSeconds",
    "Splits",
    "StepBytes",
    "StepSimulator",
    "Table",
    "UnitBytes",
    "UnitSeconds",
    "beside",
    "chunk_rows",
    "divides",
    "explain_peaks",
    "explain_section_peaks",
    "held_beside",
    "late_s",
    "num_rounds",
    "overlapped_s",
    "peak_table",
    "predict",
    "predict_sections",
    "section_seconds",
    "simulate_bytes",
    "simulate_sections",
    "split_class",
    "splits_of",
    "splittable",
    "step_seconds",
    "table_of",
    "tensor_budget_bytes",
    "unit_seconds",
    "unit_state_bytes",
]


def predict(profile: Profile, plan: Plan) -> Prediction:
    """What a plan costs by this profile: the peak of the rank that holds the most, and the seconds of a step."""
    prediction = predict_sections(
        profile,
        plan.sections,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        synchronise=plan.synchronise,
        prefetch=plan.prefetch,
        scatter_group=plan.scatter_group,
    )
    peaks = prediction.peak_by_phase | evaluation_bytes(profile, plan.sections, plan.micro_batch)
    peak_bytes = max(peaks.values())
    beside_bytes = held_beside(profile, peak_bytes, plan.scatter_group)
    return dataclasses.replace(prediction, peak_bytes=peak_bytes, peak_by_phase=peaks, held_beside=beside_bytes)


def predict_sections(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
    prefetch: int | None = None,
    scatter_group: ScatterGroup = "shared",
) -> Prediction:
    """The same for decisions that are not in a plan yet; `sections` are those of the profile, in its order.

    Where `prefetch` is None it is the profile's default.
    """
    held = simulate_sections(
        profile,
        sections,
        micro_batch=micro_batch,
        accumulation=accumulation,
        synchronise=synchronise,
        prefetch=prefetch,
        with_levels=False,
    )
    phases = step_seconds(
        profile,
        sections,
        micro_batch=micro_batch,
        accumulation=accumulation,
        synchronise=synchronise,
        prefetch=prefetch,
        scatter_group=scatter_group,
    )
    step_s = sum(phases.values())
    return Prediction(
        peak_bytes=held.peak_bytes,
        persistent_bytes=held.persistent_bytes,
        peak_by_phase=held.peak_by_phase,
        step_s=step_s,
        step_s_by_phase=phases,
        samples_per_s=micro_batch * accumulation * profile.num_ranks / step_s,
        held_beside=held_beside(profile, held.peak_bytes, scatter_group),
    )
