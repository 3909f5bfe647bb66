"""The menu: every way to run a section of a class, with its seconds and its bytes by lifetime.

A column of a menu is an assignment of choices (`choices.assignments`) with a way to recompute. Most of its figures are
sums over its units, so they are worked out for all columns at once, as arrays. The highest bytes within a section need
the step simulator: `measured` plays the columns that matter, once between neighbours that hold nothing and once
between neighbours of the same column. Until then they are those of a section without units: too low, never too high.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from osdp_ray.costs import (
    WEIGHTLESS,
    Splits,
    StepSimulator,
    Table,
    num_rounds,
    section_seconds,
    splits_of,
    table_of,
    unit_seconds,
    unit_state_bytes,
)
from osdp_ray.planning.choices import (
    CHOICES,
    RECOMPUTES,
    assignments,
    choices_of,
    large_operators,
    split_assignments,
    uniform_section,
)
from osdp_ray.records.plan import ScatterGroup, SectionPlan, Synchronise, Unit
from osdp_ray.records.profile import Profile, Recompute

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """What is decided for a whole step beside the sections."""

    micro_batch: int
    accumulation: int
    synchronise: Synchronise = "every"
    prefetch: int = 1
    scatter_group: ScatterGroup = "shared"

    @property
    def num_reducing(self) -> int:
        """Micro-batches that reduce their gradients."""
        return self.accumulation if self.synchronise == "every" else 1

    @property
    def backwards(self) -> tuple[tuple[int, bool], ...]:
        """(how many micro-batches, whether they reduce), each kind once."""
        kinds = ((self.num_reducing, True), (self.accumulation - self.num_reducing, False))
        return tuple(kind for kind in kinds if kind[0])

    @property
    def num_passes(self) -> int:
        """Micro-batches whose bytes can be the highest: the last, and the one before where gradients wait whole."""
        return 2 if self.synchronise == "last" and self.accumulation > 1 else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassFigures:
    """Bytes of a section in one micro-batch. Levels are those of costs.SectionBytes.

    base      what earlier micro-batches left of it
    kept      what its forward adds to the level
    after     what is left of that above the level after its backward
    forward   highest in its forward, above the level before it, without any buffer of a neighbour
    backward  the same of its backward (its own kept bytes are below that level)
    inner_... the same between neighbours of the same column
    """

    base: int
    kept: int
    after: int
    forward: int
    backward: int
    inner_forward: int
    inner_backward: int


class Menu:
    """All columns of a class at a step shape. Column `k * num_assignments + a` recomputes RECOMPUTES[k].

    persistent  bytes held between steps             reduced  bytes of its gradients at the optimizer's step
    base, kept, after, forward, backward  arrays [pass, column] of PassFigures, transients too low
    seconds     by name of UnitSeconds and 'forward', 'backward': of one micro-batch
    """

    def __init__(self, profile: Profile, class_index: int, shape: StepShape) -> None:
        self.profile, self.class_index, self.shape = profile, class_index, shape
        self.is_block = profile.classes[class_index].is_block
        self.recomputes: tuple[Recompute, ...] = RECOMPUTES if self.is_block else RECOMPUTES[:1]
        self.parts = _parts(profile, class_index)
        self.num_columns = len(self.parts.units) * len(self.recomputes)
        self._measured: dict[int, tuple[PassFigures, ...]] = {}
        self._tile()

    def _tile(self) -> None:
        times = len(self.recomputes)

        def tiled(values: Floats) -> Floats:
            return np.tile(values, times)

        def by_recompute(values: list[float]) -> Floats:
            return np.repeat(np.array(values, dtype=float), len(self.parts.units))

        def by_trace(values: list[list[float]]) -> Floats:
            """Figures by way to recompute and by what is split, for every column."""
            return np.array(values, dtype=float)[:, self.parts.split].ravel()

        shape, parts = self.shape, self.parts
        self.persistent, self.reduced = tiled(parts.persistent), tiled(parts.reduced)
        self.num_units = tiled(parts.num_units)
        bare = [[self._bare(recompute, splits) for splits in parts.splits] for recompute in self.recomputes]
        columns: dict[str, list[Floats]] = {name: [] for name in ("base", "kept", "after", "forward", "backward")}
        whole, held = tiled(parts.whole), tiled(parts.held)
        gathering, door = tiled(parts.gathering), tiled(parts.door if self.is_block else 0 * parts.door)
        for number in range(shape.num_passes):
            is_last = number == shape.num_passes - 1
            waits = shape.accumulation > (1 if is_last else 2)
            waiting = whole if shape.synchronise == "last" else self.reduced
            base = waiting if waits else np.zeros(self.num_columns)
            left = self.reduced if is_last and not (waits and shape.synchronise == "every") else np.zeros_like(base)
            if not is_last:
                left = np.zeros_like(base) if waits else whole
            elif shape.synchronise == "last":
                left = left - base
            least = {name: by_trace([[getattr(f, name) for f in row] for row in bare]) for name in columns}
            columns["base"].append(base)
            columns["kept"].append(least["kept"] + held)
            columns["after"].append(least["after"] + left)
            columns["forward"].append(np.maximum(least["forward"] + held, gathering))
            columns["backward"].append(np.maximum(least["backward"], door))
        if not self.is_block or self.profile.sections[0].class_index == self.class_index:
            self._correct_after(columns["after"])
        self.base, self.kept, self.after, self.forward, self.backward = (np.array(rows) for rows in columns.values())
        self.seconds = {name: tiled(values) for name, values in parts.seconds.items()}
        plain = [
            section_seconds(self.profile, self.class_index, self.section_of((), recompute), shape.micro_batch)
            for recompute in self.recomputes
        ]
        self.seconds["forward"] = by_recompute([seconds.forward_s for seconds in plain])
        self.seconds["backward"] = by_recompute([seconds.backward_s for seconds in plain])

    def _correct_after(self, rows: list[Floats]) -> None:
        """Gradients of what runs first may be reduced behind the section's end, so less or more is left of it."""
        for number, row in enumerate(rows):
            surplus = [row[column] - self.measured(column)[number].after for column in self.uniform_columns()]
            row -= max(0.0, *surplus)

    def section_of(self, units: tuple[Unit, ...], recompute: Recompute, name: str = "") -> SectionPlan:
        return SectionPlan(name=name, is_block=self.is_block, recompute=recompute, units=units)

    def section(self, column: int, name: str = "") -> SectionPlan:
        """What a section of a column does."""
        number, assignment = divmod(column, len(self.parts.units))
        return self.section_of(self.parts.units[assignment], self.recomputes[number], name)

    def uniform_columns(self) -> list[int]:
        """Columns in which all operators choose alike."""
        alike = [a for a, units in enumerate(self.parts.units) if len(units) < 2]
        return [k * len(self.parts.units) + a for k in range(len(self.recomputes)) for a in alike]

    def measured(self, column: int) -> tuple[PassFigures, ...]:
        """Exact figures of a column, by pass."""
        if column not in self._measured:
            section = self.section(column)
            alone = self._levels(section, inner=False)
            inner = self._levels(section, inner=True) if self.is_block else alone
            self._measured[column] = tuple(
                dataclasses.replace(one, inner_forward=other.forward, inner_backward=other.backward)
                for one, other in zip(alone, inner, strict=True)
            )
        return self._measured[column]

    def _bare(self, recompute: Recompute, splits: Splits) -> PassFigures:
        """Bytes of a section's own, whatever its units are: its gradients go as soon as they are there."""
        section_class = table_of(self.profile).split_class(self.class_index, splits).section_class
        units = tuple(
            Unit(operators=(operator.name,), modules=operator.modules, choice=CHOICES[0])
            for operator in section_class.operators
        )
        section, shape = self.section_of(units, recompute), self.shape
        once = _play(self.profile, self.class_index, section, shape, (True,), is_weightless=True)[0]
        if self.shape.synchronise == "last":
            waiting = _play(self.profile, self.class_index, section, shape, (False, False, True), is_weightless=True)
            backward = min(figures.backward for figures in (once, *waiting))
            return dataclasses.replace(once, backward=backward)
        return once

    def _levels(self, section: SectionPlan, *, inner: bool) -> tuple[PassFigures, ...]:
        """A section's passes among its like, or where it stands in the model, with neighbours that hold nothing."""
        shape = self.shape
        rounds = num_rounds(shape.accumulation, shape.synchronise)
        synchronises = tuple(shape.synchronise == "every" or number == rounds - 1 for number in range(rounds))
        found = _play(self.profile, self.class_index, section, shape, synchronises, inner=inner)
        return found[-shape.num_passes :]


def _play(
    profile: Profile,
    class_index: int,
    section: SectionPlan,
    shape: StepShape,
    synchronises: tuple[bool, ...],
    *,
    inner: bool = False,
    is_weightless: bool = False,
) -> tuple[PassFigures, ...]:
    """Figures of a section in successive micro-batches, without those among its like."""
    sections: tuple[SectionPlan, ...] = (section,) * 3
    classes: tuple[int, ...] = (class_index,) * 3
    middle = 1
    if not inner:
        sections, classes, middle = _among_neighbours(profile, class_index, section)
    simulator = StepSimulator(profile, sections, classes, prefetch=shape.prefetch)
    for position, units in enumerate(simulator.units):
        for unit in units:
            if position != middle and not inner:
                unit.sizes = _GONE
            elif is_weightless:
                unit.sizes = WEIGHTLESS
    passes = []
    for reduces in synchronises:
        base = simulator.level_bytes()
        forward, backward = simulator.play_micro_batch(shape.micro_batch, synchronises=reduces)
        kept = forward[middle].after_bytes - forward[middle].before_bytes
        passes.append(
            PassFigures(
                base=base,
                kept=kept,
                after=backward[middle].after_bytes - backward[middle].before_bytes + kept,
                forward=forward[middle].peak_bytes - forward[middle].before_bytes,
                backward=backward[middle].peak_bytes - backward[middle].before_bytes,
                inner_forward=0,
                inner_backward=0,
            )
        )
    return tuple(passes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """What no step shape changes, as arrays over assignments: bytes, and seconds by name of UnitSeconds.

    held       what stays of gathered parameters from forward to backward
    gathering  highest while one of the units that gather is gathered    door  the same of the first unit
    whole      gradients that are not reduced yet
    split      the index in `splits` of what is split
    """

    splits: tuple[Splits, ...]
    split: npt.NDArray[np.int64]
    units: tuple[tuple[Unit, ...], ...]
    num_units: Floats
    persistent: Floats
    reduced: Floats
    whole: Floats
    held: Floats
    gathering: Floats
    door: Floats
    seconds: dict[str, Floats]


def _parts(profile: Profile, class_index: int) -> _Parts:
    table = table_of(profile)
    key = ("parts", class_index)
    if key not in table.kept:
        section_class, choices = profile.classes[class_index], choices_of(profile)
        units = (
            *assignments(section_class, choices),
            *split_assignments(section_class, choices, large_operators(profile, class_index)),
        )
        rows: list[dict[str, float]] = []
        figures: dict[Unit, dict[str, float]] = {}
        for assignment in units:
            for unit in assignment:
                if unit not in figures:
                    figures[unit] = _unit_figures(profile, class_index, unit)
            rows.append(
                {name: sum(figures[unit][name] for unit in assignment) for name in _names(figures[assignment[0]])}
                if assignment
                else {}
            )
        names = _names(rows[0]) if rows and rows[0] else _names(_NO_FIGURES)
        arrays = {name: np.array([row.get(name, 0.0) for row in rows], dtype=float) for name in names}
        bytes_of = {name: arrays.pop(name) for name in ("persistent", "reduced", "whole", "held")}
        num_units = np.array([len(assignment) for assignment in units], float)
        while_gathered = [[_gathering_bytes(table, class_index, unit) for unit in assignment] for assignment in units]
        splits = [splits_of(section_class, assignment) for assignment in units]
        known = tuple(dict.fromkeys(splits))
        split = np.array([known.index(found) for found in splits], dtype=np.int64)
        table.kept[key] = _Parts(
            splits=known,
            split=split,
            units=units,
            num_units=num_units,
            gathering=np.array([max(row, default=0) for row in while_gathered], float),
            door=np.array([row[0] if row else 0 for row in while_gathered], float),
            seconds=arrays,
            **bytes_of,
        )
    found: _Parts = table.kept[key]
    return found


def _gathering_bytes(table: Table, class_index: int, unit: Unit) -> int:
    """What a unit holds at least while it is gathered, in either pass."""
    sizes = table.unit_bytes(class_index, unit)
    return sizes.flat_bytes + sizes.gathered_bytes if unit.choice.regather else 0


def _names(row: dict[str, Any]) -> list[str]:
    return list(row)


def _unit_figures(profile: Profile, class_index: int, unit: Unit) -> dict[str, float]:
    sizes = table_of(profile).unit_bytes(class_index, unit)
    return {
        "persistent": sizes.shard_bytes + unit_state_bytes(sizes, profile.optimizer),
        "reduced": sizes.gradient_bytes,
        "whole": sum(parameter.num_bytes for parameter in sizes.trainable),
        "held": sizes.node_shard_bytes if unit.choice.regather else sizes.gathered_bytes,
        **dataclasses.asdict(unit_seconds(profile, class_index, unit)),
    }


_NO_FIGURES: dict[str, float] = dict.fromkeys(
    (
        "persistent",
        "reduced",
        "whole",
        "held",
        "gather_forward_s",
        "gather_backward_s",
        "copy_forward_s",
        "copy_backward_s",
        "reduce_s",
        "copy_reduce_s",
        "late_reduce_s",
        "behind_late_s",
        "optimizer_s",
    ),
    0.0,
)


_GONE = dataclasses.replace(WEIGHTLESS, full_per_gradient=0.0)  # nor do its gradients wait


def _among_neighbours(
    profile: Profile, class_index: int, section: SectionPlan
) -> tuple[tuple[SectionPlan, ...], tuple[int, ...], int]:
    """(sections, classes, position): the section with the ones before and after it in the model.

    Neighbours keep what passes between sections right; their units' bytes are for the caller to take away.
    """
    members = [p for p, described in enumerate(profile.sections) if described.class_index == class_index]
    position = members[len(members) // 2]
    chosen = range(max(0, position - 1), min(len(profile.sections), position + 2))
    sections, classes = [], []
    for neighbour in chosen:
        index = profile.sections[neighbour].class_index
        is_block = profile.classes[index].is_block
        recompute = section.recompute if is_block and section.is_block else "none"
        other = uniform_section(profile.classes[index], "", CHOICES[0], recompute)
        sections.append(section if neighbour == position else other)
        classes.append(index)
    return tuple(sections), tuple(classes), position - chosen.start
