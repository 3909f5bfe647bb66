"""What the simulator teaches the program: rows for the sections of a solution whose peaks break the budget.

A section's peak in a pass is the level before it plus figures of its own, and what neighbours leave and gather ahead.
Each broken one adds the first of these rows that is not there yet:

    long slots: a stretch's own figures. With flags used (1 or more), many (2), three (3) of its column, and the level
    where its last section starts its forward, or its last or first section its backward:

      (forward)  kept behind the stretch + used (forward - kept)                          likewise inner with many
      (first)    level behind the stretch + used backward                                 likewise inner with three
      (last)     level before the stretch + used (kept - after + backward)                likewise inner with three

    borders: a neighbour of its own slot adds what two sections alone show, for every column that it can have:

      (beside)   the section's row + sum_h extra[h] n[h] - (1 - n[own]) max extra

    anything else: exactly these neighbours, by indicators i that are 1 where this is so, else 0 or less together

      (pattern)  the section's row + extra * (sum of i - number of i + 1)

In the canonical order all of them are exact or too low. `first` and `last` alone hold in every order (see
Layout.canonical); the program remembers when any other row of a long slot is put in.
"""

from collections.abc import Sequence

import numpy as np
import pulp

from osdp_ray.costs import SectionBytes, StepBytes, StepSimulator, num_rounds
from osdp_ray.planning.layout import Layout, Place
from osdp_ray.planning.menus import Floats, PassFigures
from osdp_ray.planning.program import Program

_MAX_ROWS = 12  # per solution: the highest peaks teach most
Terms = list[tuple[pulp.LpVariable, float]]


def add_cuts(program: Program, places: Sequence[Place], held: StepBytes, budget_bytes: int) -> int:
    """Adds rows that exclude a solution whose peaks break the budget; how many. 0: nothing is left to teach."""
    cutter = _Cutter(program, places, budget_bytes - program.layout.profile.calibration.peak_offset_bytes)
    broken = []
    shown = held.passes[-program.layout.shape.num_passes :]
    for number, levels in enumerate(shown):
        for in_backward, row in ((False, levels.forward), (True, levels.backward)):
            for position, level in enumerate(row):
                if level.peak_bytes > cutter.budget_bytes and cutter.is_telling(position):
                    broken.append((level.peak_bytes, number, in_backward, position, level))
    broken.sort(key=lambda item: (-item[0], item[1:4]))
    added = 0
    for _, number, in_backward, position, level in broken[:_MAX_ROWS]:
        added += cutter.cut(number, in_backward, position, level)
    return added


class _Cutter:
    def __init__(self, program: Program, places: Sequence[Place], budget_bytes: int) -> None:
        self.program, self.places, self.budget_bytes = program, places, budget_bytes
        self.layout: Layout = program.layout

    def is_telling(self, position: int) -> bool:
        """Within a stretch the sections next to its ends say it all."""
        place = self.places[position]
        return place.index < 2 or place.index >= place.num - 2

    def cut(self, number: int, in_backward: bool, position: int, level: SectionBytes) -> int:
        """Rows for one broken peak; how many."""
        place = self.places[position]
        taught = self.layout.menu(place.slot).measured(place.column)[number]
        shown = level.peak_bytes - level.before_bytes
        if self.layout.slots[place.slot].num > 1:
            added = self._stretch(number, in_backward, place, taught)
            if added:
                return added
        own = taught.backward if in_backward else taught.forward
        if shown <= own:
            return 0
        return self._beside(number, in_backward, position, shown) or self._pattern(
            number, in_backward, position, shown - own
        )

    # -- long slots

    def _stretch(self, number: int, in_backward: bool, place: Place, f: PassFigures) -> int:
        """Rows of a stretch's own figures that are not there yet."""
        wanted: list[tuple[str, str, float]] = []  # row, flag, bytes above the level
        if not in_backward:
            wanted.append(("forward", "used", f.forward - f.kept))
            if place.num > 1:
                wanted.append(("forward", "many", f.inner_forward - f.kept))
        else:
            wanted += [("first", "used", f.backward), ("last", "used", f.kept - f.after + f.backward)]
            if place.num > 2:
                wanted.append(("first", "three", f.after - f.kept + f.inner_backward))
                wanted.append(("last", "three", 2 * (f.kept - f.after) + f.inner_backward))
        added = 0
        for row, flag, more_bytes in wanted:
            name = f"{row}_{flag}_{number}_{place.slot}_{place.column}"
            if name not in self.program.names:
                terms, columns = self._level(number, row, place)
                terms.append((self.program.flag(flag, place.slot, place.column), more_bytes * self.program.per_byte))
                self.program.add_limit(name, terms, columns, 0.0)
                self.program.order_free &= flag == "used" and row != "forward"
                added += 1
        return added

    def _level(self, number: int, row: str, place: Place) -> tuple[Terms, dict[int, Floats]]:
        """The level that a row adds to: behind a stretch after its forward, or before or behind it in backward."""
        program, slot = self.program, place.slot
        order = self.layout.canonical(slot, program.columns[slot])
        at = order.index(place.column)
        keeps, leaves = (program.figures(slot, number, name) for name in ("kept", "after"))
        values = np.zeros_like(keeps)
        standing = order[: at + 1] if row != "last" else order[:at]
        values[standing] = keeps[standing]
        terms: Terms = [(program.kept[number][slot], 1.0)]
        if row != "forward":
            gone = [column for column in order if column not in standing]
            values[gone] = leaves[gone]
            terms += program.plus(program.after[number][slot + 1])
        return terms, {slot: values}

    # -- borders

    def _beside(self, number: int, in_backward: bool, position: int, shown: int) -> int:
        """A row for every neighbour that has a slot of its own and adds to the peak."""
        place = self.places[position]
        if self.layout.slots[place.slot].num > 1:
            return 0
        added = 0
        for side in (-1, 1) if in_backward else (-1,):
            other = place.slot + side
            if not 0 <= other < len(self.layout.slots) or self.layout.slots[other].num > 1:
                continue
            name = f"beside_{number}_{int(in_backward)}_{place.slot}_{place.column}_{side}"
            if name in self.program.names:
                continue
            extra = np.zeros(self.layout.menu(other).num_columns)
            for column in self.program.columns[other]:
                extra[column] = self._extra(number, in_backward, place, other, column) * self.program.per_byte
            if extra.max() <= 0:
                continue
            terms, columns, more = self._own_row(number, in_backward, place)
            own = columns[place.slot].copy()
            own[place.column] += extra.max()
            columns = {**columns, place.slot: own, other: extra}
            self.program.add_limit(name, terms, columns, more - float(extra.max()))
            added += 1
        return added

    def _extra(self, number: int, in_backward: bool, place: Place, other: int, column: int) -> int:
        """What a neighbour with a column adds to a section's peak, with no other neighbour's units near."""
        shape = self.layout.shape
        first = min(place.slot, other)
        chosen = {place.slot: place.column, other: column}
        sections, classes = [], []
        for slot in range(max(0, first - 1), min(len(self.layout.slots), first + 3)):
            menu = self.layout.menu(slot)
            own = self.layout.menu(place.slot).section(place.column)
            recompute = own.recompute if menu.is_block and own.is_block else "none"
            bare = menu.section_of((), recompute)
            sections.append(menu.section(chosen[slot]) if slot in chosen else bare)
            classes.append(menu.class_index)
        middle = place.slot - max(0, first - 1)
        simulator = StepSimulator(self.layout.profile, tuple(sections), tuple(classes), prefetch=shape.prefetch)
        rounds = num_rounds(shape.accumulation, shape.synchronise)
        passes = []
        for index in range(rounds):
            synchronises = shape.synchronise == "every" or index == rounds - 1
            passes.append(simulator.play_micro_batch(shape.micro_batch, synchronises=synchronises)[int(in_backward)])
        level = passes[-shape.num_passes :][number][middle]
        own_figures = self.layout.menu(place.slot).measured(place.column)[number]
        own_bytes = own_figures.backward if in_backward else own_figures.forward
        return max(0, level.peak_bytes - level.before_bytes - own_bytes)

    def _own_row(self, number: int, in_backward: bool, place: Place) -> tuple[Terms, dict[int, Floats], float]:
        """Terms, columns and constant of the row that a section's own figures have in the program."""
        program, slot = self.program, place.slot
        if self.layout.slots[slot].num == 1:
            name = "backward" if in_backward else "forward"
            terms: Terms = [(program.kept[number][slot + int(in_backward)], 1.0)]
            if in_backward:
                terms += program.plus(program.after[number][slot + 1])
            return terms, {slot: program.figures(slot, number, name)}, 0.0
        f = self.layout.menu(slot).measured(place.column)[number]
        at_end = place.index == place.num - 1
        row = "forward" if not in_backward else "first" if at_end else "last"
        terms, columns = self._level(number, row, place)
        more = {"forward": f.forward - f.kept, "first": f.backward, "last": f.kept - f.after + f.backward}[row]
        terms.append((program.flag("used", slot, place.column), more * program.per_byte))
        return terms, columns, 0.0

    def _pattern(self, number: int, in_backward: bool, position: int, extra_bytes: int) -> int:
        """A row for exactly these neighbours."""
        place = self.places[position]
        if place.num > 2 and 0 < place.index < place.num - 1:
            return 0
        around = self.places[max(0, position - 1) : position + 2]
        shown = "_".join(f"{other.slot}.{other.column}.{min(other.num, 3)}" for other in around)
        name = f"pattern_{number}_{int(in_backward)}_{position}_{shown}"
        if name in self.program.names:
            return 0
        indicators = [self._present(place)]
        for side in (-1, 1) if in_backward else (-1,):
            if 0 <= position + side < len(self.places):
                indicators.append(self._next_to(place, self.places[position + side], side))
        terms, columns, more = self._own_row(number, in_backward, place)
        extra = extra_bytes * self.program.per_byte
        sums: dict[pulp.LpVariable, float] = {}
        for indicator in indicators:
            for variable, factor in indicator:
                sums[variable] = sums.get(variable, 0.0) + extra * factor
        known = dict(terms)
        for slot, values in columns.items():
            for column, n in self.program.n[slot].items():
                if values[column]:
                    known[n] = known.get(n, 0.0) + float(values[column])
        for variable, factor in sums.items():
            known[variable] = known.get(variable, 0.0) + factor
        self.program.add_limit(name, list(known.items()), {}, more - extra * (len(indicators) - 1))
        self.program.order_free &= self.layout.is_taken_apart and self.layout.shape.prefetch < 2
        return 1

    def _present(self, place: Place) -> Terms:
        """1 where a column is used at all, else 0."""
        if self.layout.slots[place.slot].num == 1:
            return [(self.program.n[place.slot][place.column], 1.0)]
        return [(self.program.flag("used", place.slot, place.column), 1.0)]

    def _next_to(self, place: Place, other: Place, side: int) -> Terms:
        """1 where a stretch (or one more of the same) is on that side of a section, else 0 or less."""
        if other.stretch == place.stretch:
            return [(self.program.flag("many", place.slot, place.column), 1.0)]
        terms = self._present(other)
        for slot in {place.slot, other.slot}:
            if self.layout.slots[slot].num == 1:
                continue
            order = self.layout.canonical(slot, self.program.columns[slot])
            low, high = (other, place) if side < 0 else (place, other)
            start = order.index(low.column) + 1 if low.slot == slot else 0
            end = order.index(high.column) if high.slot == slot else len(order)
            terms += [(self.program.flag("used", slot, column), -1.0) for column in order[start:end]]
        return terms
