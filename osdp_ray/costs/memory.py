"""The step simulator, bytes: plays one optimizer step in the executor's own order and tells what is live when.

In goes a profile's traces and a plan; out come the bytes held between steps, the peak of every phase and, section by
section, the level before, within and after. The blocks' own events come from the traces; FSDP2's are added here as
torch 2.13 runs them without streams (`torch.distributed.fsdp._fully_shard`):

    before forward   gather: a flat buffer, then the whole parameters; the flat buffer of one unit is freed when the
                     next unit copies out, the last one at the end of the model's forward
    after forward    whole parameters freed, unless the unit keeps them
    before backward  gather again where they were freed, flat buffer freed at once, then the flat buffer of the unit
                     that ran before it is gathered ahead
    after backward   whole parameters freed; the previous unit's reduction input freed, this one's allocated,
                     gradients copied into it and freed, the reduced shard allocated
"""

import dataclasses
from collections.abc import Callable

from osdp_ray.costs.programs import RUN, TAKE, Pass, table_of
from osdp_ray.costs.units import UnitBytes
from osdp_ray.records.plan import Choice, Plan, SectionPlan
from osdp_ray.records.profile import (
    ENTER,
    EXIT,
    FOREIGN,
    GRADIENT,
    POST_BACKWARD,
    PRE_BACKWARD,
    ROOT,
    SECTION,
    Profile,
)

PHASES = ("forward", "loss", "backward", "optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionBytes:
    """One section in one pass: the level before and after it, and the highest live bytes within.

    A level is what is live apart from buffers that pass with the neighbours: flat buffers of gathers and the input of
    the last reduction.
    """

    before_bytes: int
    peak_bytes: int
    after_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What one step holds. `forward[i]` and `backward[i]` belong to the plan's section i (of the last micro-batch)."""

    persistent_bytes: int
    peak_by_phase: dict[str, int]
    forward: tuple[SectionBytes, ...]
    backward: tuple[SectionBytes, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_by_phase.values())


class _Unit:
    """A unit while a step is played."""

    __slots__ = (
        "all_reduces",
        "exits",
        "exits_of",
        "first",
        "gathered",
        "gradient_bytes",
        "has_shard_gradient",
        "last",
        "modules_of",
        "num_modules",
        "order",
        "pending",
        "phase",
        "regather",
        "sizes",
    )

    def __init__(self, sizes: UnitBytes, choice: Choice, modules_of: dict[int, int]) -> None:
        self.sizes, self.regather, self.modules_of = sizes, choice.regather, modules_of
        self.num_modules = sum(modules_of.values())
        self.all_reduces = choice.shard_over != "world"
        self.gathered = self.pending = self.has_shard_gradient = False
        self.order: list[int] = []  # positions in the order of forward
        self.reset()

    def reset(self) -> None:
        self.exits = self.gradient_bytes = 0
        self.exits_of: dict[int, int] = {}  # how many modules of an operator have run, however often each
        self.first = self.last = -3  # the operators that ran first and last, whose hooks run in backward
        self.phase = "idle"  # idle, before (backward has begun), after


class StepSimulator:
    """Plays steps of the sections given; `simulate_bytes` is the way in for whole plans."""

    def __init__(self, profile: Profile, sections: tuple[SectionPlan, ...], class_indices: tuple[int, ...]) -> None:
        self.profile, self.sections, self.class_indices = profile, sections, class_indices
        self.table = table_of(profile)
        self.scatter_copies = profile.backend == "gloo"  # its reduce-scatter works on a copy of its input
        self.units: list[list[_Unit]] = []
        self.by_operator: list[dict[int, _Unit]] = []
        for section, class_index in zip(sections, class_indices, strict=True):
            self._add_units(section, class_index)
        self.section_of_class = {class_index: position for position, class_index in enumerate(class_indices)}
        self.live = self.peak = self.section_peak = 0
        self.phase = "forward"
        self.peaks = dict.fromkeys(PHASES, 0)
        self.held_flat = self.reduce_input = self.pending_bytes = 0
        self.reduced_bytes = self.left_bytes = 0
        self.in_backward = False
        self.recompute_root: _Unit | None = None
        self.forward_order: list[_Unit] = []
        self.outputs: list[dict[int, int]] = [{} for _ in sections]
        self.gradient_outputs: list[dict[int, int]] = [{} for _ in sections]

    def _add_units(self, section: SectionPlan, class_index: int) -> None:
        section_class = self.profile.classes[class_index]
        index_of = {operator.name: index for index, operator in enumerate(section_class.operators)}
        units: list[_Unit] = []
        by_operator: dict[int, _Unit] = {}
        for position, planned in enumerate(section.units):
            at_door = section.is_block and position == 0
            modules = {
                index_of[name]: len(section_class.operators[index_of[name]].modules) for name in planned.operators
            }
            unit = _Unit(
                self.table.unit_bytes(class_index, planned), planned.choice, {SECTION: 1} if at_door else modules
            )
            units.append(unit)
            if at_door:
                by_operator[SECTION] = unit
            else:
                by_operator |= {index_of[name]: unit for name in planned.operators}
        self.units.append(units)
        self.by_operator.append(by_operator)

    # -- bytes

    def _alloc(self, num_bytes: int) -> None:
        self.live += num_bytes
        if self.live > self.peak:
            self.peak = self.live

    def _free(self, num_bytes: int) -> None:
        self.live -= num_bytes

    def _level(self) -> int:
        return self.live - self.held_flat - self.reduce_input - self.pending_bytes

    def _enter_phase(self, phase: str) -> None:
        self.section_peak = max(self.section_peak, self.peak)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.peak)
        self.phase, self.peak = phase, self.live

    # -- what FSDP2 does

    def _before_forward(self, unit: _Unit, subject: int) -> None:
        if unit.phase == "before":
            return  # recomputed while its backward runs: already gathered
        if unit.exits == unit.num_modules:  # the forward of recomputation, or a module that runs again
            unit.exits = 0
            unit.exits_of.clear()
        if unit.exits == 0 and not self.in_backward:
            unit.first = subject
        if self.in_backward and self.recompute_root is None:
            self.recompute_root = unit
        if unit.gathered:
            return
        sizes = unit.sizes
        self._gather_flat(unit)
        self._alloc(sizes.gathered_bytes)
        self._free(self.held_flat)  # a local of `wait_for_unshard` holds it until the copy out is done
        self.held_flat = sizes.flat_bytes
        unit.gathered = True

    def _gather_flat(self, unit: _Unit) -> None:
        """The flat buffer of a gather, unless it was gathered ahead."""
        if unit.pending:
            self.pending_bytes -= unit.sizes.flat_bytes
            unit.pending = False
        else:
            self._alloc(unit.sizes.flat_bytes)

    def _after_forward(self, unit: _Unit, subject: int) -> None:
        if unit.phase == "before":
            return
        operator = _local(subject)
        exits = unit.exits_of.get(operator, 0)
        if exits == unit.modules_of[operator]:
            return  # it runs again while others of the unit have yet to run
        unit.exits_of[operator] = exits + 1
        unit.exits += 1
        if unit.exits < unit.num_modules:
            return
        if self.in_backward:
            if unit is self.recompute_root:  # FSDP2 takes it for a forward's root, which drops the last flat buffer
                self._free(self.held_flat)
                self.held_flat = 0
                self.recompute_root = None
            return
        if unit.regather:
            self._free(unit.sizes.gathered_bytes)
            unit.gathered = False
        unit.last = subject
        unit.order.append(len(self.forward_order))
        self.forward_order.append(unit)

    def _before_backward(self, unit: _Unit, subject: int) -> None:
        if unit.phase == "before" or subject != unit.last:
            return
        unit.phase = "before"
        if not unit.gathered:
            self._gather_flat(unit)
            self._alloc(unit.sizes.gathered_bytes)
            self._free(unit.sizes.flat_bytes)
            unit.gathered = True
        if unit.order:
            index = unit.order.pop()
            if index > 0:
                ahead = self.forward_order[index - 1]
                if not ahead.gathered and not ahead.pending:
                    self._alloc(ahead.sizes.flat_bytes)
                    self.pending_bytes += ahead.sizes.flat_bytes
                    ahead.pending = True

    def _after_backward(self, unit: _Unit, subject: int) -> None:
        if subject != unit.first:
            return
        sizes = unit.sizes
        unit.phase = "after"
        if unit.gathered:
            self._free(sizes.gathered_bytes)
            unit.gathered = False
        self._free(self.reduce_input)
        self.reduce_input = 0
        if not unit.gradient_bytes:
            return
        self._alloc(sizes.reduce_bytes)
        self.reduce_input = sizes.reduce_bytes
        self.peak = max(self.peak, self.live + sizes.padding_copy_bytes)
        held_bytes = min(sizes.last_gradient_bytes, unit.gradient_bytes)  # a loop variable of `foreach_reduce` holds it
        self._free(unit.gradient_bytes - held_bytes)
        unit.gradient_bytes = 0
        self._alloc(sizes.gradient_bytes)
        if self.scatter_copies and sizes.group_size > 1:
            self.peak = max(self.peak, self.live + sizes.reduce_bytes)
        self._free(held_bytes)
        if unit.has_shard_gradient:  # added to the shard that is there
            if unit.all_reduces:
                self.reduced_bytes += sizes.gradient_bytes  # FSDP2 holds on to what it all-reduced
            else:
                self._free(sizes.gradient_bytes)
        unit.has_shard_gradient = True

    def _end_backward(self) -> None:
        for units in [self.units[0], *self.units[1:]]:
            for unit in units:
                if unit.phase != "after":
                    self._after_backward(unit, unit.first)
        self._free(self.reduce_input + self.reduced_bytes)
        self.reduce_input = self.reduced_bytes = 0
        self.recompute_root = None
        for units in self.units:
            for unit in units:
                if unit.pending:
                    self._free(unit.sizes.flat_bytes)
                    self.pending_bytes -= unit.sizes.flat_bytes
                    unit.pending = False
                unit.order.clear()
                unit.reset()
        self.forward_order.clear()

    # -- one section, one pass

    def _unit(self, position: int, subject: int) -> _Unit | None:
        if subject >= FOREIGN:
            owner, subject = divmod(subject, FOREIGN)
            if owner - 1 not in self.section_of_class:
                return None  # a section played alone
            position = self.section_of_class[owner - 1]
        return self.by_operator[position].get(subject)

    def _play(self, position: int, micro_batch: int) -> SectionBytes:
        before = self._level()
        self.peaks[self.phase] = max(self.peaks[self.phase], self.peak)
        self.peak = self.section_peak = self.live
        compiled = self.table.compiled(
            self.class_indices[position],
            self.sections[position].recompute,
            micro_batch,
            frozenset(self.by_operator[position]),
            in_backward=self.in_backward,
        )
        for code, subject, first, second in compiled.steps:
            if code == RUN:
                self.peak = max(self.peak, self.live + second)
                self.live += first
            elif code == TAKE:
                self._free(self._take(position, subject))
            elif code == GRADIENT:
                self._gradient(position, subject, self._take(position, second) if second else first)
            elif subject == ROOT:
                if code == EXIT and not self.in_backward:
                    self._end_forward()
            elif (unit := self._unit(position, subject)) is not None:
                _HOOKS[code](self, unit, _seen_from_home(unit, subject))
        self._hand_on(position, compiled)
        peak = max(self.section_peak, self.peak)
        return SectionBytes(before_bytes=before, peak_bytes=peak, after_bytes=self._level())

    def _end_forward(self) -> None:
        self._free(self.held_flat)
        self.held_flat = 0
        self._enter_phase("loss")

    def _take(self, position: int, buffer: int) -> int:
        """Takes a neighbour's buffer by its slot; its bytes."""
        slot, of_gradient = divmod(-buffer - 1, 2)
        neighbour = position + 1 if of_gradient else position - 1
        if not 0 <= neighbour < len(self.sections):
            return 0
        return (self.gradient_outputs if of_gradient else self.outputs)[neighbour].pop(slot, 0)

    def _gradient(self, position: int, operator: int, num_bytes: int) -> None:
        unit = self._unit(position, operator)
        if unit is None and operator < FOREIGN:
            unit = self.by_operator[position].get(SECTION)
        if unit is not None:
            unit.gradient_bytes += num_bytes

    def _hand_on(self, position: int, compiled: Pass) -> None:
        """Passes on what later sections free. What nobody freed dies with its section's backward, own buffers last."""
        outputs = {
            slot: self._take(position, buffer) if buffer else num_bytes
            for slot, (buffer, num_bytes) in enumerate(compiled.outputs)
        }
        if not self.in_backward:
            self.outputs[position] = outputs
            return
        left = [self.outputs[position]]
        if position + 1 < len(self.sections):
            left.append(self.gradient_outputs[position + 1])
        for buffers in left:
            self._free(sum(buffers.values()))
            buffers.clear()
        self.left_bytes += compiled.left_bytes
        self.gradient_outputs[position] = outputs

    # -- a step

    def play_micro_batch(self, micro_batch: int) -> tuple[list[SectionBytes], list[SectionBytes]]:
        """Forward and backward of one micro-batch; levels by section."""
        batch_bytes = micro_batch * self.profile.batch_bytes_per_sample
        self._enter_phase("forward")
        self._alloc(batch_bytes)
        self.in_backward = False
        forward = [self._play(position, micro_batch) for position in range(len(self.sections))]
        if self.phase == "forward":
            self._end_forward()
        self.in_backward = True
        backward = []
        for position in reversed(range(len(self.sections))):
            backward.append(self._play(position, micro_batch))
            if self.phase == "loss":
                self._enter_phase("backward")
        self._end_backward()
        self._free(self.left_bytes + sum(self.gradient_outputs[0].values()))
        self.left_bytes = 0
        self.gradient_outputs[0].clear()
        self._free(batch_bytes)
        backward.reverse()
        return forward, backward


def _local(subject: int) -> int:
    return subject % FOREIGN if subject >= FOREIGN else subject


def _seen_from_home(unit: _Unit, subject: int) -> int:
    """An operator's number wherever its hooks run; of tied modules, the one that runs elsewhere keeps its own."""
    return subject if unit.modules_of.get(_local(subject), 1) > 1 else _local(subject)


_HOOKS: dict[int, Callable[[StepSimulator, _Unit, int], None]] = {
    ENTER: StepSimulator._before_forward,
    EXIT: StepSimulator._after_forward,
    PRE_BACKWARD: StepSimulator._before_backward,
    POST_BACKWARD: StepSimulator._after_backward,
}


def simulate_bytes(profile: Profile, plan: Plan) -> StepBytes:
    """Plays one step of a plan (not the first one: optimizer state is there). Bytes of the rank that holds the most."""
    return simulate_sections(profile, plan.sections, micro_batch=plan.micro_batch, accumulation=plan.accumulation)


def simulate_sections(
    profile: Profile, sections: tuple[SectionPlan, ...], *, micro_batch: int, accumulation: int
) -> StepBytes:
    """The same for sections that are not in a plan yet; they are those of the profile, in its order."""
    class_indices = tuple(section.class_index for section in profile.sections)
    simulator = StepSimulator(profile, sections, class_indices)
    sizes = [unit.sizes for units in simulator.units for unit in units]
    optimizer = profile.optimizer
    state = sum(
        round(size.gradient_bytes * optimizer.state_bytes_per_byte)
        + size.num_trainable * optimizer.state_bytes_per_tensor
        for size in sizes
    )
    persistent = sum(size.shard_bytes for size in sizes) + state + profile.buffer_bytes
    simulator.live = simulator.peak = persistent
    for _ in range(min(accumulation, 2)):
        forward, backward = simulator.play_micro_batch(micro_batch)
    simulator._enter_phase("optimizer")
    trainable = sum(size.gradient_bytes for size in sizes)
    largest = max((size.largest_trainable_bytes for size in sizes), default=0)
    simulator._alloc(round(largest * optimizer.step_bytes_per_largest + trainable * optimizer.step_bytes_per_total))
    simulator._enter_phase("optimizer")
    offset = profile.calibration.peak_offset_bytes
    return StepBytes(
        persistent_bytes=persistent,
        peak_by_phase={phase: peak + offset for phase, peak in simulator.peaks.items()},
        forward=tuple(forward),
        backward=tuple(backward),
    )
