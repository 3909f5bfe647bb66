"""What a decision costs: bytes by lifetime, seconds by phase. Pure Python; the planner, the report and the checks of a
run all ask here.
"""

import dataclasses
from typing import TypedDict

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
from osdp_ray.records.plan import Plan, Prediction, SectionPlan, Synchronise
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


class _Shape(TypedDict):
    micro_batch: int
    accumulation: int
    synchronise: Synchronise


def predict(profile: Profile, plan: Plan) -> Prediction:
    """What a plan costs by this profile: the peak of the rank that holds the most, and the seconds of a step."""
    prediction = predict_sections(
        profile,
        plan.sections,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        synchronise=plan.synchronise,
    )
    peaks = prediction.peak_by_phase | evaluation_bytes(profile, plan.sections, plan.micro_batch)
    peak_bytes = max(peaks.values())
    return dataclasses.replace(
        prediction, peak_bytes=peak_bytes, peak_by_phase=peaks, held_beside=held_beside(profile, peak_bytes)
    )


def predict_sections(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
) -> Prediction:
    """The same for decisions that are not in a plan yet; `sections` are those of the profile, in its order."""
    shape: _Shape = {"micro_batch": micro_batch, "accumulation": accumulation, "synchronise": synchronise}
    held = simulate_sections(profile, sections, **shape, with_levels=False)
    phases = step_seconds(profile, sections, **shape)
    step_s = sum(phases.values())
    return Prediction(
        peak_bytes=held.peak_bytes,
        persistent_bytes=held.persistent_bytes,
        peak_by_phase=held.peak_by_phase,
        step_s=step_s,
        step_s_by_phase=phases,
        samples_per_s=micro_batch * accumulation * profile.num_ranks / step_s,
        held_beside=held_beside(profile, held.peak_bytes),
    )
