"""The program's objective: seconds of a step as sums over columns, with what depends on neighbours as rows.

Taking turns, a column's seconds are its own, but for what is waited for of late reductions A when backward has nothing
to hide them, C what the backward of a section computes, 0 where it has collectives of its own that wait for them:

    w  >=  all of  sum(A[j], j <= i) - (1 + s) sum(C[j], j < i)

A row for a boundary of slots is exact between slots of one section where no collectives are in between, and too low by
little within long ones.

Side by side (see costs.streams), what computing does not hide of a link depends on the neighbour that hides it. With
expo(c, k) = beside(c, k) - c = max(k - c, k s / (1 + s)) a step is

    accumulation * (sum F[i] + G[0] + sum expo(F[i-1], G[i]))
      + for micro-batches that reduce and those that do not:
            sum B[i] + H[last] + R[0] + sum expo(B[i], R[i+1] + H[i-1])
      + sum of the optimizer's seconds

(where reductions have a communicator of their own, max(R[i+1], H[i-1]): each a row of its own).
expo is the larger of two linear functions, so between sections with slots of their own it is exact as a variable above
two rows. Within long slots F hardly differs between columns, so expo(max F, G) is the column's own; of backward, an
estimate takes every column among its like. A bound must hold in every order, in which section i hides R[i+1] + H[i-1]
of others. One row takes all links of the slot against all its computing. It lets every section hide what any other
exposes, so there are rows for reference columns too, those that a relaxed solution uses, with R0, H0, B0:

    max(0, R + H - B)  >=  max(0, R0 + H - B0) - min(h, max(0, B - B0)) - min(h, max(0, R0 - R))

with h the highest of the first term over the slot's columns; likewise with R and H the other way round. Summed over the
slot all three are the columns' own. The sections at its ends hide links of other slots, so two of the first terms go.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from osdp_ray.planning.layout import Layout
from osdp_ray.planning.menus import Floats, Menu
from osdp_ray.records.profile import Profile

_MOST_LATE_ROWS = 12
# Whether a row takes a reduction, and a gather, of a section's neighbours.
_JOINT, _SIDE_BY_SIDE = ((True, True),), ((True, False), (False, True))

Columns = dict[int, Floats]  # slot -> a figure of each column of its menu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exposure:
    """`times` the seconds of: the larger of 0 (weight 0) and every `sum of columns + constant`."""

    name: str
    times: float
    rows: tuple[tuple[Columns, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Seconds of a step: `own` by slot and column, `constant_s`, and what neighbours expose of each other."""

    own: tuple[Floats, ...]
    constant_s: float
    exposures: tuple[Exposure, ...]


References = Mapping[int, Sequence[int]]  # slot -> columns


def objective(layout: Layout, *, is_bound: bool, references: References | None = None) -> Objective:
    """What the program minimises: a bound that no plan undercuts, or an estimate of contiguous stretches."""
    if not layout.profile.overlaps:
        own = tuple(_taking_turns(layout.menu(slot)) for slot in range(len(layout.slots)))
        return Objective(own=own, constant_s=0.0, exposures=tuple(_late(layout)))
    return _Overlapped(layout, is_bound, references or {}).objective()


def _taking_turns(menu: Menu) -> Floats:
    seconds, accumulation = menu.seconds, menu.shape.accumulation
    total = accumulation * (seconds["forward"] + seconds["copy_forward_s"] + seconds["gather_forward_s"])
    for times, reduces in menu.shape.backwards:
        total = total + times * (_backward(menu, reduces) + _link(menu, "gather_backward_s"))
        if reduces:
            total = total + times * (seconds["reduce_s"] + slowed_fraction(menu.profile) * seconds["late_reduce_s"])
    return total + seconds["optimizer_s"]


def slowed_fraction(profile: Profile) -> float:
    """Seconds by which computing is longer, per second of a collective beside it."""
    return profile.overlap_slowdown_fraction / (1 + profile.overlap_slowdown_fraction)


def _late(layout: Layout) -> Iterator[Exposure]:
    num, faster = len(layout.slots), 1 + layout.profile.overlap_slowdown_fraction
    late = {slot: layout.menu(slot).seconds["late_reduce_s"] for slot in range(num)}
    if not any(float(found.max()) > 0 for found in late.values()):
        return
    hides = {slot: faster * _hiding(layout.menu(slot)) for slot in range(num)}
    rows: list[tuple[Columns, float]] = []
    spacing = -(-num // _MOST_LATE_ROWS)
    for last in range((num - 1) % spacing, num, spacing):
        columns = {slot: late[slot] - hides[slot] for slot in range(last)}
        columns[last], constant = late[last], 0.0
        if layout.slots[last].num > 1:
            columns[last], constant = late[last] - hides[last], float(hides[last].min())
        rows.append((columns, constant))
    times = sum(times for times, reduces in layout.shape.backwards if reduces)
    yield Exposure(name="late", times=times / faster, rows=tuple(rows))


def _hiding(menu: Menu) -> Floats:
    """What a section's backward computes, of those before which no late reduction is waited for."""
    has_none = menu.seconds["behind_late_s"] == 0.0
    hiding: Floats = np.where(has_none, _backward(menu, reduces=True), 0.0)
    return hiding


def _forward(menu: Menu) -> Floats:
    return menu.seconds["forward"] + menu.seconds["copy_forward_s"]


def _backward(menu: Menu, reduces: bool) -> Floats:
    total = menu.seconds["backward"] + menu.seconds["copy_backward_s"]
    return total + menu.seconds["copy_reduce_s"] if reduces else total


def _link(menu: Menu, name: str, used: bool = True) -> Floats:
    return menu.seconds[name] if used else np.zeros(menu.num_columns)


class _Overlapped:
    """Collects the objective of communication beside computation; names as in the module's docstring."""

    def __init__(self, layout: Layout, is_bound: bool, references: References) -> None:
        self.layout, self.is_bound, self.references = layout, is_bound, references
        self.slots, self.last = layout.slots, len(layout.slots) - 1
        self.sigma = slowed_fraction(layout.profile)
        self.shares = layout.shape.scatter_group == "shared"
        self.own = [_forward(layout.menu(slot)) * layout.shape.accumulation for slot in range(len(self.slots))]
        self.constant_s = 0.0
        self.exposures: list[Exposure] = []

    def objective(self) -> Objective:
        for slot in range(len(self.slots)):
            self._add_forward(slot)
            for times, reduces in self.layout.shape.backwards:
                self._add_backward(slot, times, reduces)
            self.own[slot] = self.own[slot] + self.layout.menu(slot).seconds["optimizer_s"]
        return Objective(own=tuple(self.own), constant_s=self.constant_s, exposures=tuple(self.exposures))

    def _expo(self, compute: Floats | float, link: Floats) -> Floats:
        found: Floats = np.maximum(link - compute, self.sigma * link)
        return found

    def _add_forward(self, slot: int) -> None:
        menu, times = self.layout.menu(slot), self.layout.shape.accumulation
        gather = menu.seconds["gather_forward_s"]
        before = self.layout.menu(slot - 1) if slot else None
        if self.slots[slot].num > 1:
            among = self._expo(_forward(menu).max(), gather)
            self.own[slot] = self.own[slot] + times * among
            if before is None:
                self.constant_s += times * float((gather - among).min() if self.is_bound else 0.0)
            elif self.is_bound:
                first = among - self._expo(_forward(before).max(), gather)
                self.constant_s -= times * max(0.0, float(first.max()))
        elif before is None:
            self.own[slot] = self.own[slot] + times * gather
        else:
            hidden: tuple[Columns, float] = ({slot: gather, slot - 1: -_forward(before)}, 0.0)
            if self.slots[slot - 1].num > 1:
                hidden = ({slot: gather}, -float(_forward(before).max()))
            self._expose(f"expo_forward_{slot}", times, (hidden, ({slot: self.sigma * gather}, 0.0)))

    def _add_backward(self, slot: int, times: int, reduces: bool) -> None:
        menu, name = self.layout.menu(slot), f"expo_backward_{slot}_{int(reduces)}"
        compute = _backward(menu, reduces)
        reduce, gather = _link(menu, "reduce_s", reduces), menu.seconds["gather_backward_s"]
        self.own[slot] = self.own[slot] + times * compute
        is_long = self.slots[slot].num > 1
        for is_end, link in ((slot == 0, reduce), (slot == self.last, gather)):  # what nothing hides
            if is_end and is_long:
                self.constant_s += times * float(link.min())
            elif is_end:
                self.own[slot] = self.own[slot] + times * link
        if is_long and not self.is_bound:
            link = reduce + gather if self.shares else np.maximum(reduce, gather)
            self.own[slot] = self.own[slot] + times * self._expo(compute, link)
            return
        rows: list[tuple[Columns, float]] = []
        for takes_reduce, takes_gather in _JOINT if self.shares else _SIDE_BY_SIDE:
            columns, constant = self._beside(slot, reduces and takes_reduce, takes_gather)
            if is_long:
                own = reduce * takes_reduce + gather * takes_gather
                columns[slot] = own
                constant -= float(reduce.max() * takes_reduce + gather.max() * takes_gather)
            hidden = {**columns, slot: columns.get(slot, np.zeros(menu.num_columns)) - compute}
            slowed = {other: self.sigma * link for other, link in columns.items()}
            rows += [(hidden, constant), (slowed, self.sigma * constant)]
        if is_long and self.shares:
            rows += self._referred(slot, compute, reduce, gather)
        self._expose(name, times, tuple(rows))

    def _referred(self, slot: int, compute: Floats, reduce: Floats, gather: Floats) -> Iterator[tuple[Columns, float]]:
        """Rows of a long slot for its reference columns; see the module's docstring."""
        for column in self.references.get(slot, ()):
            more = np.maximum(compute - compute[column], 0.0)
            for link, other in ((gather, reduce), (reduce, gather)):
                exposed = np.maximum(link + other[column] - compute[column], 0.0)
                highest = float(exposed.max())
                less = np.maximum(other[column] - other, 0.0)
                own = exposed - np.minimum(more, highest) - np.minimum(less, highest)
                if highest > 0:
                    yield {slot: own}, -2 * highest

    def _beside(self, slot: int, reduces: bool, gathers: bool) -> tuple[Columns, float]:
        """The link time of a slot's neighbours that runs beside it: of long ones, the least that it can be."""
        columns: Columns = {}
        constant = 0.0
        for other, name, used in ((slot + 1, "reduce_s", reduces), (slot - 1, "gather_backward_s", gathers)):
            if not 0 <= other <= self.last or not used:
                continue
            link = self.layout.menu(other).seconds[name]
            if self.slots[other].num > 1:
                constant += float(link.min())
            else:
                columns[other] = link
        return columns, constant

    def _expose(self, name: str, times: int, rows: tuple[tuple[Columns, float], ...]) -> None:
        live = tuple((c, k) for c, k in rows if k > 0 or any(float(link.max()) > 0 for link in c.values()))
        if live:
            self.exposures.append(Exposure(name=name, times=times, rows=live))
