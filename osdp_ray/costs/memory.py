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

from collections.abc import Callable

from osdp_ray.costs.levels import PHASES, Held, PlayedUnit, SectionBytes
from osdp_ray.costs.programs import BEAR, RUN, Pass, table_of
from osdp_ray.records.plan import SectionPlan
from osdp_ray.records.profile import (
    ENTER,
    EXIT,
    FOREIGN,
    FREE,
    GRADIENT,
    HOLD,
    POST_BACKWARD,
    PRE_BACKWARD,
    ROOT,
    SECTION,
    Profile,
)


class StepSimulator:
    """Plays steps of the sections given; `simulate_bytes` is the way in for whole plans."""

    def __init__(self, profile: Profile, sections: tuple[SectionPlan, ...], class_indices: tuple[int, ...]) -> None:
        self.profile, self.sections, self.class_indices = profile, sections, class_indices
        self.table = table_of(profile)
        self.copies = profile.backend == "gloo"  # its gather and reduce-scatter work on a copy of the whole
        self.units: list[list[PlayedUnit]] = []
        self.by_operator: list[dict[int, PlayedUnit]] = []
        for section, class_index in zip(sections, class_indices, strict=True):
            self._add_units(section, class_index)
        self.section_of_class = {class_index: position for position, class_index in enumerate(class_indices)}
        self.live = self.peak = self.section_peak = 0
        self.phase = "forward"
        self.peaks = dict.fromkeys(PHASES, 0)
        self.held_flat = self.reduce_input = self.pending_bytes = 0
        self.reduced_bytes = self.left_bytes = 0
        self.in_backward = False
        self.synchronises = True
        self.recompute_root: PlayedUnit | None = None
        self.forward_order: list[PlayedUnit] = []
        self.own: list[dict[int, Held]] = [{} for _ in sections]
        self.outputs: list[list[Held | None]] = [[] for _ in sections]
        self.gradient_outputs: list[list[Held | None]] = [[] for _ in sections]

    def _add_units(self, section: SectionPlan, class_index: int) -> None:
        section_class = self.profile.classes[class_index]
        index_of = {operator.name: index for index, operator in enumerate(section_class.operators)}
        units: list[PlayedUnit] = []
        by_operator: dict[int, PlayedUnit] = {}
        for position, planned in enumerate(section.units):
            at_door = section.is_block and position == 0
            modules = {
                index_of[name]: len(section_class.operators[index_of[name]].modules) for name in planned.operators
            }
            unit = PlayedUnit(
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

    def _before_forward(self, unit: PlayedUnit, subject: int) -> None:
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
        self._copy_out(unit)
        self._free(self.held_flat)  # a local of `wait_for_unshard` holds it until the copy out is done
        self.held_flat = sizes.flat_bytes
        unit.gathered = True

    def _gather_flat(self, unit: PlayedUnit) -> None:
        """The flat buffer of a gather, unless it was gathered ahead."""
        if unit.pending:
            self.pending_bytes -= unit.sizes.flat_bytes
            unit.pending = False
        else:
            self._alloc_flat(unit)

    def _alloc_flat(self, unit: PlayedUnit) -> None:
        self._alloc(unit.sizes.flat_bytes)
        copy_bytes = unit.sizes.flat_bytes if self.copies else 0
        self.peak = max(self.peak, self.live + unit.sizes.cast_bytes + copy_bytes)

    def _copy_out(self, unit: PlayedUnit) -> None:
        self.peak = max(self.peak, self.live + unit.sizes.copy_peak_bytes)
        self._alloc(unit.sizes.gathered_bytes)

    def _after_forward(self, unit: PlayedUnit, subject: int) -> None:
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

    def _before_backward(self, unit: PlayedUnit, subject: int) -> None:
        if unit.phase == "before" or subject != unit.last:
            return
        unit.phase = "before"
        if not unit.gathered:
            self._gather_flat(unit)
            self._copy_out(unit)
            self._free(unit.sizes.flat_bytes)
            unit.gathered = True
        if unit.order:
            index = unit.order.pop()
            if index > 0:
                ahead = self.forward_order[index - 1]
                if not ahead.gathered and not ahead.pending:
                    self._alloc_flat(ahead)
                    self.pending_bytes += ahead.sizes.flat_bytes
                    ahead.pending = True

    def _after_backward(self, unit: PlayedUnit, subject: int) -> None:
        if subject != unit.first:
            return
        sizes = unit.sizes
        unit.phase = "after"
        if unit.full_gradient_bytes:
            if self.profile.device_kind == "cpu" and unit.gradient_bytes:
                self.peak = max(self.peak, self.live + sizes.accumulate_peak_bytes)
            self._free(unit.gradient_bytes)  # added to what waits
            unit.gradient_bytes = 0
        if unit.gathered:
            self._free(sizes.gathered_bytes)
            unit.gathered = False
        if not self.synchronises:
            self._keep_whole_gradients(unit)
            return
        unit.gradient_bytes += unit.full_gradient_bytes
        waited = unit.full_gradient_bytes > 0
        last_bytes = sizes.last_full_gradient_bytes if waited else sizes.last_gradient_bytes
        unit.full_gradient_bytes = 0
        self._free(self.reduce_input)
        self.reduce_input = 0
        if not unit.gradient_bytes:
            return
        self._alloc(sizes.reduce_bytes)
        self.reduce_input = sizes.reduce_bytes
        if self.profile.device_kind == "cpu":
            self.peak = max(
                self.peak, self.live + (sizes.scatter_copy_full_bytes if waited else sizes.scatter_copy_bytes)
            )
        held_bytes = min(last_bytes, unit.gradient_bytes)  # a loop variable of `foreach_reduce` holds it
        self._free(unit.gradient_bytes - held_bytes)
        unit.gradient_bytes = 0
        self._alloc(sizes.gradient_bytes)
        if self.copies and sizes.group_size > 1:
            self.peak = max(self.peak, self.live + sizes.reduce_bytes)
        self._free(held_bytes)
        if unit.has_shard_gradient:  # added to the shard that is there
            if unit.all_reduces:
                self.reduced_bytes += sizes.gradient_bytes  # FSDP2 holds on to what it all-reduced
            else:
                self._free(sizes.gradient_bytes)
        unit.has_shard_gradient = True

    def _keep_whole_gradients(self, unit: PlayedUnit) -> None:
        """Gradients that are not reduced yet wait in the type of the reduction, cast one by one."""
        if not unit.full_gradient_bytes:
            sizes, gradient_bytes = unit.sizes, unit.gradient_bytes
            unit.full_gradient_bytes = round(gradient_bytes * sizes.full_per_gradient)
            if unit.full_gradient_bytes != gradient_bytes:
                self._alloc(unit.full_gradient_bytes)
                self._free(gradient_bytes)
        unit.gradient_bytes = 0

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

    def _unit(self, position: int, subject: int) -> PlayedUnit | None:
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
                self._run(first, second)
            elif code == BEAR:
                self.own[position][subject] = Held(first)
                self._alloc(first)
            elif code in (HOLD, FREE):
                self._hold(self._held(position, subject), 1 if code == HOLD else -1)
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

    def _run(self, net: int, peak: int) -> None:
        self.peak = max(self.peak, self.live + peak)
        self.live += net

    def _end_forward(self) -> None:
        self._free(self.held_flat)
        self.held_flat = 0
        self._enter_phase("loss")

    def _held(self, position: int, buffer: int) -> Held | None:
        """An own buffer that is handed on, or a neighbour's by its slot; None where there is no such neighbour."""
        if buffer >= 0:
            return self.own[position].get(buffer)
        slot, of_gradient = divmod(-buffer - 1, 2)
        neighbour = position + 1 if of_gradient else position - 1
        if not 0 <= neighbour < len(self.sections):
            return None
        handed = (self.gradient_outputs if of_gradient else self.outputs)[neighbour]
        return handed[slot] if slot < len(handed) else None

    def _hold(self, held: Held | None, change: int) -> None:
        if held is not None and held.holders > 0:
            held.holders += change
            if held.holders == 0:
                self._free(held.num_bytes)

    def _take(self, position: int, buffer: int) -> int:
        """Makes a neighbour's buffer something else, which is freed elsewhere; its bytes."""
        held = self._held(position, buffer)
        if held is None or held.holders == 0:
            return 0
        held.holders = 0
        return held.num_bytes

    def _gradient(self, position: int, operator: int, num_bytes: int) -> None:
        unit = self._unit(position, operator)
        if unit is None and operator < FOREIGN:
            unit = self.by_operator[position].get(SECTION)
        if unit is None:
            return
        if unit.full_gradient_bytes and unit.sizes.full_per_gradient == 1:
            self._free(num_bytes)  # autograd adds it to the gradient that is there
        else:
            unit.gradient_bytes += num_bytes

    def _hand_on(self, position: int, compiled: Pass) -> None:
        """Passes on what later sections free. What nobody freed dies with its section's backward, own buffers last."""
        handed = [self._held(position, buffer) for buffer in compiled.outputs]
        if not self.in_backward:
            self.outputs[position] = handed
            return
        left = [*self.own[position].values()]
        if position + 1 < len(self.sections):
            left += [held for held in self.gradient_outputs[position + 1] if held is not None]
        for held in left:
            if held.holders and held not in handed:
                held.holders = 0
                self._free(held.num_bytes)
        self.own[position].clear()
        self.left_bytes += compiled.left_bytes
        self.gradient_outputs[position] = handed

    # -- a step

    def play_micro_batch(
        self, micro_batch: int, *, synchronises: bool = True
    ) -> tuple[list[SectionBytes], list[SectionBytes]]:
        """Forward and backward of one micro-batch, gradients reduced at its end or not; levels by section."""
        self.synchronises = synchronises
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
        self._free(self.left_bytes)
        self.left_bytes = 0
        for held in self.gradient_outputs[0]:
            if held is not None and held.holders:
                held.holders = 0
                self._free(held.num_bytes)
        self._free(batch_bytes)
        backward.reverse()
        return forward, backward


def _local(subject: int) -> int:
    return subject % FOREIGN if subject >= FOREIGN else subject


def _seen_from_home(unit: PlayedUnit, subject: int) -> int:
    """An operator's number wherever its hooks run; of tied modules, the one that runs elsewhere keeps its own."""
    return subject if unit.modules_of.get(_local(subject), 1) > 1 else _local(subject)


_HOOKS: dict[int, Callable[[StepSimulator, PlayedUnit, int], None]] = {
    ENTER: StepSimulator._before_forward,
    EXIT: StepSimulator._after_forward,
    PRE_BACKWARD: StepSimulator._before_backward,
    POST_BACKWARD: StepSimulator._after_backward,
}
