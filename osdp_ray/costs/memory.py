"""The step simulator, bytes: plays one optimizer step in the executor's own order and tells what is live when.

In goes a profile's traces and a plan; out come the bytes held between steps, the peak of every phase and, section by
section, the level before, within and after. The blocks' own events come from the traces, FSDP2's from `gathering`.
"""

from collections.abc import Callable

from osdp_ray.costs.gathering import Fsdp2, local_subject
from osdp_ray.costs.levels import Held, PlayedUnit, SectionBytes
from osdp_ray.costs.programs import BEAR, EVALUATION, RUN, Pass, table_of
from osdp_ray.costs.splitting import Splits, splits_of
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


class StepSimulator(Fsdp2):
    """Plays steps of the sections given; `simulate_bytes` is the way in for whole plans."""

    def __init__(
        self,
        profile: Profile,
        sections: tuple[SectionPlan, ...],
        class_indices: tuple[int, ...],
        *,
        prefetch: int | None = None,
    ) -> None:
        super().__init__(profile, prefetch)
        self.sections, self.class_indices = sections, class_indices
        self.times = (1,) * len(sections)  # how many sections of the model each one stands for
        self.table = table_of(profile)
        self.by_operator: list[dict[int, PlayedUnit]] = []
        self.splits: list[Splits] = []
        for section, class_index in zip(sections, class_indices, strict=True):
            self._add_units(section, class_index)
        trained = (p for p, units in enumerate(self.units) if any(unit.sizes.num_trainable for unit in units))
        self.last_in_backward = next(trained, 0)
        self.section_of_class = {class_index: position for position, class_index in enumerate(class_indices)}
        self.left_bytes = 0
        self.held_late: list[Held | None] = []  # let go of when backward has returned
        self.own: list[dict[int, Held]] = [{} for _ in sections]
        self.outputs: list[list[Held | None]] = [[] for _ in sections]
        self.gradient_outputs: list[list[Held | None]] = [[] for _ in sections]

    def _add_units(self, section: SectionPlan, class_index: int) -> None:
        splits = splits_of(self.profile.classes[class_index], section.units)
        chosen = self.table.split_class(class_index, splits)
        index_of = chosen.subjects
        num_modules = {index_of[operator.name]: len(operator.modules) for operator in chosen.section_class.operators}
        units: list[PlayedUnit] = []
        by_operator: dict[int, PlayedUnit] = {}
        for position, planned in enumerate(section.units):
            at_door = section.is_block and position == 0
            modules = {index_of[name]: num_modules[index_of[name]] for name in planned.operators}
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
        self.splits.append(splits)

    # -- one section, one pass

    def _unit(self, position: int, subject: int) -> PlayedUnit | None:
        if subject >= FOREIGN:
            owner, subject = divmod(subject, FOREIGN)
            if owner - 1 not in self.section_of_class:
                return None  # a section played alone
            position = self.section_of_class[owner - 1]
        return self.by_operator[position].get(subject)

    def _play(self, position: int, micro_batch: int) -> SectionBytes:
        before = self.level_bytes()
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.peak)
        self.peak = self.section_peak = self.live
        compiled = self.table.compiled(
            self.class_indices[position],
            EVALUATION if self.phase == EVALUATION else self.sections[position].recompute,
            micro_batch,
            frozenset(self.by_operator[position]),
            in_backward=self.in_backward,
            splits=self.splits[position],
        )
        ends = self.in_backward and position <= self.last_in_backward
        late = compiled.late if ends else len(compiled.steps)
        for number, (code, subject, first, second) in enumerate(compiled.steps):
            if number >= late:
                self.held_late.append(self._held(position, subject))
            elif code == RUN:
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
        return SectionBytes(before_bytes=before, peak_bytes=peak, after_bytes=self.level_bytes())

    def _run(self, net: int, peak: int) -> None:
        self.peak = max(self.peak, self.live + peak)
        self.live += net

    def _end_forward(self) -> None:
        self._free(self.held_flat)
        self.held_flat = 0
        if self.phase == "forward":
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
            if held.holders and held not in handed and held not in self.held_late:
                held.holders = 0
                self._free(held.num_bytes)
        self.own[position].clear()
        self.left_bytes += compiled.left_bytes
        self.gradient_outputs[position] = handed

    # -- a step

    def play_evaluation(self, micro_batch: int) -> None:
        """A forward without gradients, on a simulator that plays no steps."""
        self._enter_phase(EVALUATION)
        batch_bytes = micro_batch * self.profile.batch_bytes_per_sample
        self._alloc(batch_bytes)
        for position in range(len(self.sections)):
            self._play(position, micro_batch)
        self._enter_phase(EVALUATION)
        self._free(batch_bytes)

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
        for held in self.held_late:
            self._hold(held, -1)
        self.held_late.clear()
        self._free(self.left_bytes)
        self.left_bytes = 0
        for held in self.gradient_outputs[0]:
            if held is not None and held.holders:
                held.holders = 0
                self._free(held.num_bytes)
        self._free(batch_bytes)
        backward.reverse()
        return forward, backward


def _seen_from_home(unit: PlayedUnit, subject: int) -> int:
    """An operator's number wherever its hooks run; of tied modules, the one that runs elsewhere keeps its own."""
    return subject if unit.modules_of.get(local_subject(subject), 1) > 1 else local_subject(subject)


_HOOKS: dict[int, Callable[[StepSimulator, PlayedUnit, int], None]] = {
    ENTER: StepSimulator._before_forward,
    EXIT: StepSimulator._after_forward,
    PRE_BACKWARD: StepSimulator._before_backward,
    POST_BACKWARD: StepSimulator._after_backward,
}
