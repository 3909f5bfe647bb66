"""Seconds of a step, by phase: forward, backward (with recomputation), communication, optimizer.

Backends without streams (gloo on CPU) run gathers and scatters between the computations, so a step is the sum:

    accumulation * sum over sections (forward + backward [+ what is recomputed] + its units' collectives)
    + optimizer

A unit's collectives per micro-batch: a gather before forward and, if it was freed, one before backward; then a
reduce-scatter (world), an all-reduce (none), or a reduce-scatter inside the node and an all-reduce across nodes
(node). FSDP2 copies gathered parameters out of, and gradients into, flat buffers; a replicated unit copies too.
"""

import dataclasses

from osdp_ray.costs.programs import table_of
from osdp_ray.costs.units import UnitBytes
from osdp_ray.records.plan import Choice, SectionPlan, Synchronise
from osdp_ray.records.profile import GroupKind, Profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionSeconds:
    """Seconds of one section in one micro-batch, and of its share of the optimizer's step."""

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float
    optimizer_s: float

    def step_s(self, accumulation: int) -> float:
        """Of a step that reduces gradients in every micro-batch."""
        return accumulation * (self.forward_s + self.backward_s + self.gather_s + self.reduce_s) + self.optimizer_s


def section_seconds(profile: Profile, class_index: int, section: SectionPlan, micro_batch: int) -> SectionSeconds:
    """Seconds of a section of a class under its plan."""
    cost, factor = profile.compute[class_index], profile.calibration.compute_factor
    table = table_of(profile)
    forward_s = cost.forward_s(micro_batch) * factor
    backward_s = cost.backward_s(micro_batch) * factor
    backward_s += cost.recompute_s(section.recompute, micro_batch) * factor
    gather_s = reduce_s = optimizer_s = 0.0
    for unit in section.units:
        sizes = table.unit_bytes(class_index, unit)
        gather_s += _gather_seconds(profile, unit.choice, sizes)
        reduce_s += _reduce_seconds(profile, unit.choice, sizes)
        optimizer_s += (
            sizes.gradient_bytes * profile.optimizer.step_s_per_byte
            + sizes.num_trainable * profile.optimizer.step_s_per_tensor
        )
    factor = profile.calibration.communication_factor
    return SectionSeconds(
        forward_s=forward_s,
        backward_s=backward_s,
        gather_s=gather_s * factor,
        reduce_s=reduce_s * factor,
        optimizer_s=optimizer_s,
    )


def step_seconds(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
) -> dict[str, float]:
    """Seconds of a step by phase."""
    num_reductions = accumulation if synchronise == "every" else 1
    phases = dict.fromkeys(("forward", "backward", "communication", "optimizer"), 0.0)
    for section, described in zip(sections, profile.sections, strict=True):
        seconds = section_seconds(profile, described.class_index, section, micro_batch)
        phases["forward"] += accumulation * seconds.forward_s
        phases["backward"] += accumulation * seconds.backward_s
        phases["communication"] += accumulation * seconds.gather_s + num_reductions * seconds.reduce_s
        phases["optimizer"] += seconds.optimizer_s
    return phases


def _gather_seconds(profile: Profile, choice: Choice, sizes: UnitBytes) -> float:
    """Gathers of one unit in one micro-batch, and the copies out of their flat buffers."""
    num_gathers = 2 if choice.regather else 1
    seconds = sizes.gathered_bytes / profile.copy_bytes_per_s
    if sizes.group_size > 1:
        group: GroupKind = "node" if choice.shard_over == "node" else "world"
        seconds += _collective(profile, group, "all_gather", sizes.flat_bytes)
    return num_gathers * seconds


def _reduce_seconds(profile: Profile, choice: Choice, sizes: UnitBytes) -> float:
    """The reduction of one unit's gradients, and the copy into its flat buffer."""
    seconds = sizes.reduce_bytes / profile.copy_bytes_per_s
    if choice.shard_over == "none" or sizes.group_size == 1:
        seconds += sizes.reduce_bytes / profile.copy_bytes_per_s
        return seconds + _collective(profile, "world", "all_reduce", sizes.reduce_bytes)
    group: GroupKind = "node" if choice.shard_over == "node" else "world"
    seconds += _collective(profile, group, "reduce_scatter", sizes.reduce_bytes)
    if group == "node":
        seconds += _collective(profile, "across", "all_reduce", sizes.gradient_bytes)
    return seconds


def _collective(profile: Profile, group: GroupKind, name: str, num_bytes: int) -> float:
    if num_bytes == 0:
        return 0.0
    return profile.link(group, name).seconds(num_bytes)  # type: ignore[arg-type]
