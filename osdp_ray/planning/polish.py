"""The last pass over a plan: sections that another column makes faster, and that still fits, one at a time.

The program knows long rows of blocks by counts, in one order, and links between them by estimates; the plan is known
position by position. Of every stretch of equal sections the first and the last one are looked at, and the stretch as a
whole. What a change saves is worked out for all columns at once, as costs.streams has it: beside section p only the
sections before and behind it change. What it holds is bounded from below by the program's rows; what may fit is played
by the simulator: first what also holds less, then the rest, the fastest first. The number of plays is limited, so that
the same plan comes out on any machine.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from osdp_ray.costs import simulate_sections
from osdp_ray.planning.choices import made_whole
from osdp_ray.planning.late import added_among_its_like_s, added_by_column_s, added_s
from osdp_ray.planning.layout import Layout, build_layout, canonical
from osdp_ray.planning.menus import Floats
from osdp_ray.planning.search import ROUNDING_FRACTION, Candidate, better, bytes_words, candidate
from osdp_ray.records.plan import SectionPlan
from osdp_ray.records.profile import Profile

_MAX_PLAYS = 60
_MAX_PLAYS_IN_VAIN = 12  # in a row
_PER_POSITION = 3


def polished(profile: Profile, found: Candidate, budget_bytes: int) -> Candidate:
    """A plan that is at least as fast as the one found, at the same batch, and fits."""
    polish = _Polish(profile, found)
    if polish.is_known:
        sections = polish.run(budget_bytes)
        changed = candidate(profile, sections, found.shape)
        if sections != found.sections and better(changed, found):
            found = changed
    return _in_order(profile, _without_idle_slices(profile, found, budget_bytes), budget_bytes)


def _without_idle_slices(profile: Profile, found: Candidate, budget_bytes: int) -> Candidate:
    """The plan without slices that save no time and no memory that is needed."""
    classes = [section.class_index for section in profile.sections]
    first = 0
    for _, group in itertools.groupby(zip(classes, found.sections, strict=True), key=_does):
        run = list(group)
        class_index, section = run[0]
        for operator in section.splits:
            now = found.sections[first]
            whole = made_whole(profile.classes[class_index], now, (operator,))
            if whole is None:
                continue
            changed = [
                dataclasses.replace(whole, name=other.name) for other in found.sections[first : first + len(run)]
            ]
            sections = (*found.sections[:first], *changed, *found.sections[first + len(run) :])
            simpler = candidate(profile, sections, found.shape)
            slower = found.samples_per_s / simpler.samples_per_s - 1
            if simpler.prediction.peak_bytes <= budget_bytes and slower <= ROUNDING_FRACTION / 4:
                found = simpler
        first += len(run)
    return found


def _in_order(profile: Profile, found: Candidate, budget_bytes: int) -> Candidate:
    """Of plans that differ only in the order of neighbours of one class, and are equally fast, the canonical one."""
    known = _Polish(profile, found)
    if not known.is_known:
        return found
    sections: list[SectionPlan] = []
    pairs = zip(known.classes, known.columns, strict=True)
    for class_index, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        menu, columns = known.layout.menus[class_index], [column for _, column in group]
        order = {column: number for number, column in enumerate(canonical(menu, sorted(set(columns))))}
        for column in sorted(columns, key=order.__getitem__):
            sections.append(menu.section(column, profile.sections[len(sections)].name))
    ordered = candidate(profile, tuple(sections), found.shape)
    slower = found.samples_per_s / ordered.samples_per_s - 1
    fits = ordered.prediction.peak_bytes <= max(budget_bytes, found.prediction.peak_bytes)
    return ordered if fits and slower <= ROUNDING_FRACTION / 4 else found


def _does(pair: tuple[int, SectionPlan]) -> tuple[object, ...]:
    return pair[0], pair[1].recompute, pair[1].units


@dataclasses.dataclass(frozen=True)
class _Change:
    """Positions `first` to `end - 1` take a column; `more_s` seconds of a step, below 0 where it is faster.

    `is_leaner`: the column holds no more at the end of forward than the one before.
    """

    is_leaner: bool
    more_s: float
    first: int
    end: int
    column: int


class _Polish:
    """`columns` are those of the sections, by position; `is_known` where all of them are in the menus."""

    def __init__(self, profile: Profile, found: Candidate) -> None:
        self.profile, self.shape, self.step_s = profile, found.shape, found.prediction.step_s
        self.layout = build_layout(profile, found.shape)
        self.classes = [section.class_index for section in profile.sections]
        self.sections = list(found.sections)
        numbers = [
            {(menu.section(j).units, menu.section(j).recompute): j for j in range(menu.num_columns)}
            for menu in self.layout.menus
        ]
        places = [
            numbers[class_index].get((section.units, section.recompute))
            for class_index, section in zip(self.classes, found.sections, strict=True)
        ]
        self.columns = [place for place in places if place is not None]
        self.is_known = len(self.columns) == len(places)
        self._slowdown = profile.overlap_slowdown_fraction

    def run(self, budget_bytes: int) -> tuple[SectionPlan, ...]:
        plays = in_vain = 0
        tried: set[tuple[int, int, int, tuple[int, ...]]] = set()
        while plays < _MAX_PLAYS and in_vain < _MAX_PLAYS_IN_VAIN:
            applied = False
            for change in sorted(self._changes(budget_bytes), key=_order):
                key = (change.first, change.end, change.column, tuple(self.columns))
                if key in tried or plays >= _MAX_PLAYS or in_vain >= _MAX_PLAYS_IN_VAIN:
                    continue
                tried.add(key)
                plays += 1
                if self._apply(change, budget_bytes):
                    applied, in_vain = True, 0
                    break
                in_vain += 1
            if not applied:
                break
        return tuple(self.sections)

    def _apply(self, change: _Change, budget_bytes: int) -> bool:
        sections = list(self.sections)
        for position in range(change.first, change.end):
            menu = self.layout.menus[self.classes[position]]
            sections[position] = menu.section(change.column, sections[position].name)
        held = simulate_sections(self.profile, tuple(sections), **bytes_words(self.shape), with_levels=False)
        if held.peak_bytes > budget_bytes:
            return False
        self.sections = sections
        self.columns[change.first : change.end] = [change.column] * (change.end - change.first)
        return True

    # -- what changes save

    def _changes(self, budget_bytes: int) -> Iterator[_Change]:
        """Changes that make the step faster and may fit."""
        least = -ROUNDING_FRACTION / 2 * self.step_s
        levels = _Levels(self.layout, self.classes, self.columns)
        for first, end in _stretches(self.classes, self.columns):
            for position in dict.fromkeys((first, end - 1)):
                more = self._more_s(position)
                more[~levels.may_fit(position, budget_bytes)] = 0.0
                order, is_leaner = np.argsort(more, kind="stable"), self._is_leaner(position)
                leaner = [j for j in order if more[j] < least and is_leaner[j]]
                for j in dict.fromkeys((*order[:_PER_POSITION], *leaner[:_PER_POSITION])):
                    if more[j] < least:
                        yield _Change(bool(is_leaner[j]), float(more[j]), position, position + 1, int(j))
            if end - first > 1:
                yield from self._of_stretch(first, end, least)

    def _of_stretch(self, first: int, end: int, least: float) -> Iterator[_Change]:
        """The best changes of a whole stretch, by what they save among their like."""
        menu, column = self.layout.menus[self.classes[first]], self.columns[first]
        before, own = self._total_s(self.columns), self._alike_s(first)
        for j in np.argsort(own, kind="stable")[:_PER_POSITION]:
            if own[j] < own[column] and int(j) != column and j < menu.num_columns:
                changed = [*self.columns[:first], *[int(j)] * (end - first), *self.columns[end:]]
                more = self._total_s(changed) - before
                if more < least:
                    yield _Change(bool(self._is_leaner(first)[j]), more, first, end, int(j))

    def _is_leaner(self, position: int) -> npt.NDArray[np.bool_]:
        """Whether each column holds no more at the end of forward than the one at a position does."""
        menu = self.layout.menus[self.classes[position]]
        held = menu.persistent + menu.base[-1] + menu.kept[-1]
        found: npt.NDArray[np.bool_] = held <= held[self.columns[position]]
        return found

    def _more_s(self, position: int) -> Floats:
        """What every column at a position adds to the seconds of the step."""
        values = self._around_s(position)
        more: Floats = values - values[self.columns[position]]
        return more

    def _around_s(self, position: int) -> Floats:
        """Seconds that a section's column has to do with, for every column of its menu."""
        menu = self.layout.menus[self.classes[position]]
        named = menu.seconds
        total = named["optimizer_s"].copy()
        if not self.profile.overlaps:
            return total + self._in_turns_s(position)
        num, last = self.shape.accumulation, len(self.columns) - 1
        gather, busy = named["gather_forward_s"], named["forward"] + named["copy_forward_s"]
        total = total + num * (self._beside(self._forward(position - 1), gather) if position else gather)
        total = total + num * (
            self._beside(busy, self._link(position + 1, "gather_forward_s")) if position < last else busy
        )
        for times, reduces in menu.shape.backwards:
            reduce = named["reduce_s"] * reduces
            gather = named["gather_backward_s"]
            total = total + times * (reduce * (position == 0) + gather * (position == last))
            own = named["backward"] + named["copy_backward_s"] + named["copy_reduce_s"] * reduces
            before, behind = self._link(position - 1, "gather_backward_s"), self._link(position + 1, "reduce_s")
            links = self._joint(behind * reduces, before)
            total = total + times * self._beside(own, links)
            if position:
                of_before = self._joint(reduce, self._link(position - 2, "gather_backward_s"))
                total = total + times * self._beside(self._backward(position - 1, reduces), of_before)
            if position < last:
                of_behind = self._joint(self._link(position + 2, "reduce_s") * reduces, gather)
                total = total + times * self._beside(self._backward(position + 1, reduces), of_behind)
        return total

    def _alike_s(self, position: int) -> Floats:
        """Seconds of a section among its like, for every column of its menu."""
        menu = self.layout.menus[self.classes[position]]
        named = menu.seconds
        hides = self.profile.overlaps
        busy, gather = named["forward"] + named["copy_forward_s"], named["gather_forward_s"]
        total = self.shape.accumulation * (self._beside(busy, gather) if hides else busy + gather)
        for times, reduces in menu.shape.backwards:
            busy = named["backward"] + named["copy_backward_s"] + named["copy_reduce_s"] * reduces
            links = self._joint(named["reduce_s"] * reduces, named["gather_backward_s"])
            total = total + times * (self._beside(busy, links) if hides else busy + links)
            if reduces:
                total = total + times * added_among_its_like_s(
                    busy, named["late_reduce_s"], named["behind_late_s"], self._slowdown, is_first=position == 0
                )
        return total + named["optimizer_s"]

    def _in_turns_s(self, position: int) -> Floats:
        """Seconds of a pass in turns, and of all late reductions, for every column at a position."""
        menu = self.layout.menus[self.classes[position]]
        named = menu.seconds
        total = self.shape.accumulation * (named["forward"] + named["copy_forward_s"] + named["gather_forward_s"])
        for times, reduces in menu.shape.backwards:
            busy = _busy(named, reduces)
            total = total + times * (busy + named["gather_backward_s"])
            if not reduces:
                continue
            total = total + times * named["reduce_s"]
            late = named["late_reduce_s"]
            late_s = np.array([self._link(p, "late_reduce_s") for p in range(len(self.columns))])
            if not late_s.any() and not late.any():
                continue
            busy_s = np.array([self._backward(p, True) for p in range(len(self.columns))])
            behind_s = np.array([self._link(p, "behind_late_s") for p in range(len(self.columns))])
            own, rows = (busy, late, named["behind_late_s"]), (busy_s, late_s, behind_s)
            total = total + times * added_by_column_s(position, own, rows, self._slowdown)
        return total

    def _total_s(self, columns: Sequence[int]) -> float:
        """Seconds of a step with these columns."""

        def of(name: str) -> Floats:
            pairs = zip(self.classes, columns, strict=True)
            return np.array([self.layout.menus[c].seconds[name][j] for c, j in pairs])

        num, hides = self.shape.accumulation, self.profile.overlaps
        busy, gather, reduce = of("forward") + of("copy_forward_s"), of("gather_forward_s"), of("reduce_s")
        again = of("gather_backward_s")
        total = float(of("optimizer_s").sum())
        if not hides:
            total += num * float((busy + gather).sum())
        else:
            total += num * float(gather[0] + busy[-1] + self._beside(busy[:-1], gather[1:]).sum())
        for times, reduces in self.layout.menus[0].shape.backwards:
            own = of("backward") + of("copy_backward_s") + of("copy_reduce_s") * reduces
            if not hides:
                total += times * float((own + again + reduce * reduces).sum())
                if reduces:
                    total += times * added_s(own, of("late_reduce_s"), of("behind_late_s"), self._slowdown)
                continue
            links = self._joint(np.append(reduce[1:] * reduces, 0.0), np.insert(again[:-1], 0, 0.0))
            total += times * float(again[-1] + reduce[0] * reduces + self._beside(own, links).sum())
        return total

    def _beside(self, compute: Floats | float, link: Floats | float) -> Floats:
        """costs.beside, for arrays."""
        slowed = self._slowdown / (1 + self._slowdown)
        found: Floats = np.maximum(link, compute + np.asarray(link) * slowed)
        return found

    def _joint(self, reduce: Floats | float, gather: Floats | float) -> Floats:
        """Seconds of a reduction and a gather that start together."""
        shares = self.shape.scatter_group == "shared" or not self.profile.overlaps
        found: Floats = np.add(reduce, gather) if shares else np.maximum(reduce, gather)
        return found

    def _link(self, position: int, name: str) -> float:
        if not 0 <= position < len(self.columns):
            return 0.0
        return float(self.layout.menus[self.classes[position]].seconds[name][self.columns[position]])

    def _forward(self, position: int) -> float:
        return self._link(position, "forward") + self._link(position, "copy_forward_s")

    def _backward(self, position: int, reduces: bool) -> float:
        seconds = self._link(position, "backward") + self._link(position, "copy_backward_s")
        return seconds + self._link(position, "copy_reduce_s") if reduces else seconds


def _busy(named: Mapping[str, Floats], reduces: bool) -> Floats:
    """What a section's backward computes."""
    found = named["backward"] + named["copy_backward_s"]
    return found + named["copy_reduce_s"] if reduces else found


def _order(change: _Change) -> tuple[bool, float, int, int, int]:
    return (not change.is_leaner, change.more_s, change.first, change.end, change.column)


def _stretches(classes: Sequence[int], columns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of every stretch of sections of one class and column."""
    first = 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or (classes[end], columns[end]) != (classes[first], columns[first]):
            yield first, end
            first = end


class _Levels:
    """What sections hold at least, by the rows of the program: those of slots of one section; see program.py."""

    def __init__(self, layout: Layout, classes: Sequence[int], columns: Sequence[int]) -> None:
        self.layout, self.classes, self.columns = layout, classes, columns
        self.passes = [self._pass(number) for number in range(layout.shape.num_passes)]

    def _of(self, position: int, name: str, number: int) -> Floats:
        menu = self.layout.menus[self.classes[position]]
        found: Floats = menu.persistent if name == "persistent" else getattr(menu, name)[number]
        return found

    def _pass(self, number: int) -> tuple[Floats, ...]:
        """(kept before each section, left behind each one, persistent bytes and base, highest forward, backward)."""
        named = {
            name: np.array([self._of(p, name, number)[j] for p, j in enumerate(self.columns)])
            for name in ("persistent", "base", "kept", "after", "forward", "backward")
        }
        kept = np.concatenate(([0.0], np.cumsum(named["kept"])))
        after = np.concatenate((np.cumsum(named["after"][::-1])[::-1], [0.0]))
        always = float((named["persistent"] + named["base"]).sum()) + self.layout.fixed_bytes
        forward, backward = kept[:-1] + named["forward"], kept[1:] + after[1:] + named["backward"]
        return kept, after, np.array([always]), forward, backward

    def may_fit(self, position: int, budget_bytes: int) -> npt.NDArray[np.bool_]:
        """Whether every column at a position may keep the budget, as far as lower bounds tell."""
        fits = np.ones(self.layout.menus[self.classes[position]].num_columns, dtype=bool)
        for number, (kept, after, always, forward, backward) in enumerate(self.passes):
            now = self.columns[position]

            def more(name: str, number: int = number, now: int = now) -> Floats:
                values = self._of(position, name, number)
                change: Floats = values - values[now]
                return change

            level = always[0] + more("persistent") + more("base")
            keeps, leaves = self._of(position, "kept", number), more("after")
            before = max(_highest(forward[:position]), 0.0), _highest(backward[:position])
            behind = max(_highest(forward[position + 1 :]), _highest(backward[position + 1 :]))
            own = kept[position] + self._of(position, "forward", number)
            own_backward = kept[position] + keeps + after[position + 1] + self._of(position, "backward", number)
            peak = np.maximum(before[0], before[1] + leaves)
            peak = np.maximum(peak, behind + more("kept"))
            peak = np.maximum(np.maximum(peak, own), own_backward)
            fits &= level + peak <= budget_bytes
        return fits


def _highest(values: Floats) -> float:
    return float(values.max()) if len(values) else float("-inf")
