"""Whole steps, played by the simulator: what a plan's step holds between steps and at its highest, by phase."""

import dataclasses
from collections.abc import Callable

from osdp_ray.costs.levels import PassBytes, StepBytes
from osdp_ray.costs.memory import StepSimulator
from osdp_ray.costs.programs import EVALUATION
from osdp_ray.costs.runs import RowSimulator
from osdp_ray.costs.starting import starting_bytes
from osdp_ray.costs.units import UnitBytes
from osdp_ray.records.plan import Plan, SectionPlan, Synchronise
from osdp_ray.records.profile import OptimizerCost, Profile


def simulate_bytes(
    profile: Profile, plan: Plan, *, is_first: bool = False, clips: bool = False, rank: int = 0
) -> StepBytes:
    """Plays the start of a plan, one step and an evaluation: bytes of a rank, the first of which holds the most.

    In the first step the optimizer makes its state when it steps; a run that was resumed has it from the start. With
    `clips` the norms of gradients are counted, some bytes per tensor, which a plan's own prediction leaves out.
    """
    held = simulate_sections(
        profile,
        plan.sections,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        synchronise=plan.synchronise,
        prefetch=plan.prefetch,
        is_first=is_first,
        clips=clips,
        rank=rank,
    )
    evaluation = evaluation_bytes(profile, plan.sections, plan.micro_batch, rank=rank)
    return dataclasses.replace(held, peak_by_phase=held.peak_by_phase | evaluation)


def simulate_sections(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
    prefetch: int | None = None,
    is_first: bool = False,
    clips: bool = False,
    rank: int = 0,
    with_levels: bool = True,
) -> StepBytes:
    """The same for sections that are not in a plan yet; they are those of the profile, in its order.

    Without levels the passes are empty, which is faster for deep models.
    """
    class_indices = tuple(section.class_index for section in profile.sections)
    simulator = RowSimulator(profile, sections, class_indices, prefetch=prefetch)
    simulator.with_levels = with_levels
    starting = starting_bytes(simulator, state_bytes(simulator, rank), rank)
    held = play_step(simulator, micro_batch, accumulation, synchronise, is_first=is_first, clips=clips, rank=rank)
    return dataclasses.replace(held, peak_by_phase=starting | held.peak_by_phase)


def play_step(
    simulator: StepSimulator,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise,
    *,
    is_first: bool = False,
    clips: bool = False,
    rank: int = 0,
) -> StepBytes:
    """Plays a whole step, the optimizer's too, on a fresh simulator of a whole model."""
    profile = simulator.profile
    state = state_bytes(simulator, rank)
    persistent = persistent_bytes(simulator, rank)
    if is_first:
        persistent -= state
    simulator.live = simulator.peak = persistent
    rounds = num_rounds(accumulation, synchronise)
    passes = []
    for number in range(1, rounds + 1):
        forward, backward = simulator.play_micro_batch(
            micro_batch, synchronises=synchronise == "every" or number == rounds
        )
        passes.append(PassBytes(forward=tuple(forward), backward=tuple(backward)))
    simulator._enter_phase("optimizer")
    trainable = _total(simulator, lambda size: size.gradient_bytes)
    sizes = [unit.sizes for units in simulator.units for unit in units]
    largest = max((size.largest_trainable_bytes for size in sizes), default=0)
    optimizer = profile.optimizer
    if clips:
        simulator._touch(clipping_bytes(_total(simulator, lambda size: size.num_trainable)))
    if is_first:
        simulator._alloc(state)
    simulator._alloc(round(largest * optimizer.step_bytes_per_largest + trainable * optimizer.step_bytes_per_total))
    simulator._enter_phase("optimizer")
    offset = profile.calibration.peak_offset_bytes
    return StepBytes(
        persistent_bytes=persistent,
        peak_by_phase={phase: peak + offset for phase, peak in simulator.peaks.items()},
        passes=tuple(passes),
    )


def num_rounds(accumulation: int, synchronise: Synchronise) -> int:
    """How many micro-batches of a step differ; later ones repeat the ones before."""
    return min(accumulation, 2 if synchronise == "every" else 3)


def clipping_bytes(num_tensors: int) -> int:
    """Most that `clip_grad_norm` holds beside gradients: of all on one mesh their norms, stacked, and squared, in fp32.

    Of gradients on several meshes it is a little less.
    """
    return max(12 * num_tensors + 4, 4 * num_tensors + 36)


def evaluation_bytes(
    profile: Profile, sections: tuple[SectionPlan, ...], micro_batch: int, *, rank: int = 0
) -> dict[str, int]:
    """The peak while batches are evaluated between two steps, by the name of the phase; {} where it was not traced."""
    if not profile.evaluation:
        return {}
    class_indices = tuple(section.class_index for section in profile.sections)
    simulator = RowSimulator(profile, sections, class_indices)
    play_evaluation(simulator, micro_batch, rank)
    return {EVALUATION: simulator.peaks[EVALUATION] + profile.calibration.peak_offset_bytes}


def play_evaluation(simulator: StepSimulator, micro_batch: int, rank: int = 0) -> None:
    """Plays one batch: after each, the executor frees what units keep gathered, so none holds more than the first."""
    simulator.live = simulator.peak = persistent_bytes(simulator, rank)
    simulator.play_evaluation(micro_batch)


def persistent_bytes(simulator: StepSimulator, rank: int = 0) -> int:
    """What a rank holds between steps: shards, which FSDP2 pads, optimizer state, which is not padded, and buffers."""
    shards = _total(simulator, lambda size: size.shard_bytes)
    return shards + state_bytes(simulator, rank) + simulator.profile.buffer_bytes


def state_bytes(simulator: StepSimulator, rank: int = 0) -> int:
    """The optimizer's state on a rank: where a dimension does not divide by the group, the last ranks hold less."""
    optimizer = simulator.profile.optimizer
    return _total(simulator, lambda size: unit_state_bytes(size, optimizer, rank))


def _total(simulator: StepSimulator, figure: Callable[[UnitBytes], int]) -> int:
    """The sum of a figure over the units of the model."""
    played = zip(simulator.units, simulator.times, strict=True)
    return sum(times * figure(unit.sizes) for units, times in played for unit in units)


def unit_state_bytes(sizes: UnitBytes, optimizer: OptimizerCost, rank: int = 0) -> int:
    """The optimizer's state of one unit on a rank."""
    local = sizes.local_bytes(rank % sizes.group_size)
    return round(local * optimizer.state_bytes_per_byte) + sizes.num_trainable * optimizer.state_bytes_per_tensor
