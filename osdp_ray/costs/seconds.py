"""Seconds of a section in one micro-batch, by what they are spent on; `streams.py` puts them in a row.

A unit's collectives per micro-batch: a gather before forward and, if it was freed, one before backward; then a
reduce-scatter (world), an all-reduce (none), or a reduce-scatter inside the node and an all-reduce across nodes
(node). Where a node's shard is kept, the second gather stays inside the node. FSDP2 copies gathered parameters out of,
and gradients into, flat buffers; a replicated unit copies too. Copies are computation: they take turns with it wherever
communication runs. So does what FSDP2 itself takes for a unit, its hooks and views, which counts among the copies of
the same pass.
"""

import dataclasses

from osdp_ray.costs.programs import table_of
from osdp_ray.costs.units import UnitBytes
from osdp_ray.records.overheads import UnitOverhead
from osdp_ray.records.plan import Choice, SectionPlan, Unit
from osdp_ray.records.profile import GroupKind, Profile


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitSeconds:
    """Seconds of one unit in one micro-batch, and of its share of the optimizer's step.

    gather_...  on the link, before forward and before backward; copy_... out of flat buffers, in the same passes
    reduce_s    on the link, after backward; copy_reduce_s into flat buffers; FSDP2's own seconds are in the copies
    late_reduce_s  a reduction that runs while backward goes on, where others take turns with it (modeling.replicas)
    behind_late_s  of gather_backward_s and reduce_s what goes the way of late reductions, and waits for those before it
    """

    gather_forward_s: float = 0.0
    gather_backward_s: float = 0.0
    copy_forward_s: float = 0.0
    copy_backward_s: float = 0.0
    reduce_s: float = 0.0
    copy_reduce_s: float = 0.0
    late_reduce_s: float = 0.0
    behind_late_s: float = 0.0
    optimizer_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionSeconds(UnitSeconds):
    """The same of a section: the sums over its units, and its computing. `backward_s` recomputes too."""

    forward_s: float
    backward_s: float

    def pass_s(self, *, reduces: bool) -> float:
        """Of a micro-batch in which communication and computation take turns, without what is reduced late."""
        seconds = self.forward_busy_s() + self.backward_busy_s(reduces=reduces)
        seconds += self.gather_forward_s + self.gather_backward_s
        return seconds + self.reduce_s if reduces else seconds

    def forward_busy_s(self) -> float:
        """What its forward keeps the computing stream busy for."""
        return self.forward_s + self.copy_forward_s

    def backward_busy_s(self, *, reduces: bool) -> float:
        """The same of its backward."""
        return self.backward_s + self.copy_backward_s + (self.copy_reduce_s if reduces else 0.0)


def section_seconds(profile: Profile, class_index: int, section: SectionPlan, micro_batch: int) -> SectionSeconds:
    """Seconds of a section of a class under its plan."""
    kept = table_of(profile).kept
    key = ("section_seconds", class_index, section.units, section.recompute, micro_batch)
    if key not in kept:
        kept[key] = _section_seconds(profile, class_index, section, micro_batch)
    found: SectionSeconds = kept[key]
    return found


def _section_seconds(profile: Profile, class_index: int, section: SectionPlan, micro_batch: int) -> SectionSeconds:
    cost, factor = profile.compute[class_index], profile.calibration.compute_factor
    backward_s = cost.backward_s(micro_batch) + cost.recompute_s(section.recompute, micro_batch)
    sums = dict.fromkeys((field.name for field in dataclasses.fields(UnitSeconds)), 0.0)
    for unit in section.units:
        seconds = unit_seconds(profile, class_index, unit)
        for name in sums:
            sums[name] += getattr(seconds, name)
    forward_s = cost.forward_s(micro_batch)
    if profile.classes[class_index].name == "stem":  # there is one: what a pass takes beside its sections
        forward_s += profile.pass_overhead.pass_s + profile.pass_overhead.sample_s * micro_batch
    return SectionSeconds(forward_s=forward_s * factor, backward_s=backward_s * factor, **sums)


def unit_seconds(profile: Profile, class_index: int, unit: Unit) -> UnitSeconds:
    """Seconds of a unit of a section of a class; no micro-batch changes them."""
    kept = table_of(profile).kept
    key = ("unit_seconds", class_index, unit)
    if key not in kept:
        kept[key] = _unit_seconds(profile, unit.choice, table_of(profile).unit_bytes(class_index, unit))
    found: UnitSeconds = kept[key]
    return found


def _unit_seconds(profile: Profile, choice: Choice, sizes: UnitBytes) -> UnitSeconds:
    factor = profile.calibration.communication_factor
    copy_s, keep_s = sizes.gathered_bytes / profile.copy_bytes_per_s, sizes.node_shard_bytes / profile.copy_bytes_per_s
    gather_s = 0.0
    if sizes.group_size > 1:
        gather_s = _collective(profile, _group(choice), "all_gather", sizes.flat_bytes)
    gather_again_s = gather_s
    if choice.keep_node_shard:
        gather_again_s = _collective(profile, "node", "all_gather", sizes.flat_bytes)
    own = _overhead(profile, choice if sizes.group_size > 1 else None)
    copied_bytes = sizes.reduce_bytes or sizes.replica_peak_waited_bytes
    reduce_copy_s = copied_bytes / profile.copy_bytes_per_s
    num = sizes.num_trainable
    ready_s = copy_s + own.gathering_s(num, sizes.flat_bytes)
    optimizer = profile.optimizer
    reduce_s = _reduce_s(profile, choice, sizes) * factor
    is_late = sizes.group_size == 1 and profile.backend == "gloo" and not profile.overlaps
    in_world = sizes.group_size > 1 and choice.shard_over == "world"
    again_in_world_s = gather_again_s if choice.regather and not choice.keep_node_shard else 0.0
    return UnitSeconds(
        gather_forward_s=gather_s * factor,
        gather_backward_s=gather_again_s * factor if choice.regather else 0.0,
        copy_forward_s=(ready_s + keep_s) * factor,
        copy_backward_s=ready_s * factor if choice.regather else 0.0,
        reduce_s=0.0 if is_late else reduce_s,
        late_reduce_s=reduce_s if is_late else 0.0,
        behind_late_s=again_in_world_s * factor + reduce_s if in_world else 0.0,
        copy_reduce_s=(reduce_copy_s + own.reducing_s(num, sizes.reduce_bytes)) * factor,
        optimizer_s=sizes.gradient_bytes * optimizer.step_s_per_byte
        + num * (optimizer.step_s_per_tensor + optimizer.step_constant_s / max(1, _num_trainable(profile))),
    )


_NO_OVERHEAD = UnitOverhead(
    shard_over="none",
    gather_s=0.0,
    gather_s_per_tensor=0.0,
    gather_s_per_byte=0.0,
    reduce_s=0.0,
    reduce_s_per_tensor=0.0,
    reduce_s_per_byte=0.0,
)


def _overhead(profile: Profile, choice: Choice | None) -> UnitOverhead:
    """That of units of a choice, None for replicated ones."""
    wanted = "none" if choice is None else _group(choice)
    return next((own for own in profile.unit_overheads if own.shard_over == wanted), _NO_OVERHEAD)


def _num_trainable(profile: Profile) -> int:
    """Tensors that the optimizer steps, in the whole model: each carries its part of a step's constant."""
    kept = table_of(profile).kept
    if ("num_trainable",) not in kept:
        counts = [sum(parameter.requires_grad for parameter in c.parameters) for c in profile.classes]
        kept[("num_trainable",)] = sum(counts[section.class_index] for section in profile.sections)
    found: int = kept[("num_trainable",)]
    return found


def _reduce_s(profile: Profile, choice: Choice, sizes: UnitBytes) -> float:
    """The reduction of one unit's gradients on the links."""
    if sizes.group_size == 1:
        return sum(_collective(profile, "world", "all_reduce", num_bytes) for num_bytes in sizes.replica_bytes)
    seconds = _collective(profile, _group(choice), "reduce_scatter", sizes.reduce_bytes)
    if choice.shard_over == "node":
        seconds += _collective(profile, "across", "all_reduce", sizes.gradient_bytes)
    return seconds


def _group(choice: Choice) -> GroupKind:
    return "node" if choice.shard_over == "node" else "world"


def _collective(profile: Profile, group: GroupKind, name: str, num_bytes: int) -> float:
    if num_bytes == 0:
        return 0.0
    return profile.link(group, name).seconds(num_bytes)  # type: ignore[arg-type]
