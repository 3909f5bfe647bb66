"""Where nothing fits: the lowest peak that any plan has, what binds there, and what helps.

The program with the budget as its objective gives plans and a bound from below; what neighbours add to a peak is mended
afterwards, section by section around the peak, which takes fewer solves than teaching the program every pair.
"""

from osdp_ray.costs import StepBytes, explain_section_peaks, simulate_sections
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning.choices import RECOMPUTES, choices_of, uniform_sections
from osdp_ray.planning.costing import objective
from osdp_ray.planning.cuts import add_cuts
from osdp_ray.planning.layout import Layout, build_layout, compute_s
from osdp_ray.planning.menus import StepShape
from osdp_ray.planning.program import Program
from osdp_ray.planning.relaxation import Relaxation, relax
from osdp_ray.planning.search import Candidate, bytes_words, candidate, largest_operator
from osdp_ray.records.plan import SectionPlan
from osdp_ray.records.profile import Profile

_NUM_COLUMNS = 20  # of a slot
_CLOSE_FRACTION = 0.002
_MAX_SOLVES = 6
_MAX_MENDED_SECTIONS = 240  # of a plan that is mended: each mend of a deep model simulates more


def infeasible(profile: Profile, lean: Candidate, budget_bytes: int) -> InfeasibleError:
    """The error with the smallest budget that fits: that of the leanest plan."""
    peaks = explain_section_peaks(profile, lean.sections, **bytes_words(lean.shape))
    peak = max(peaks, key=lambda found: found.peak_bytes)
    holder = largest_operator(profile, peak.section)
    return InfeasibleError(budget_bytes, lean.prediction.device_bytes, peak.phase, holder, lean.shape.micro_batch)


def leanest(profile: Profile, shapes: list[StepShape]) -> Candidate:
    """The plan with the lowest peak at the smallest micro-batch, of the program's and the uniform ones.

    Whole gradients that wait are never leaner, so only shapes that reduce in every micro-batch are looked at.
    """
    smallest = min(shape.micro_batch for shape in shapes)
    shape = next(shape for shape in shapes if shape.micro_batch == smallest and shape.synchronise == "every")
    finder = _Leanest(build_layout(profile, shape))
    return candidate(profile, finder.run(), shape)


class _Leanest:
    """`sections` are the leanest so far, `peak_bytes` what they peak at."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.profile, self.words = layout, layout.profile, bytes_words(layout.shape)
        uniform = [
            uniform_sections(self.profile, choice, recompute)
            for choice in choices_of(self.profile)
            for recompute in RECOMPUTES
        ]
        self.sections = min(uniform, key=lambda sections: self._held(sections).peak_bytes)
        self.peak_bytes = self._held(self.sections).peak_bytes

    def run(self) -> tuple[SectionPlan, ...]:
        scale_bytes, scale_s = self.peak_bytes, max(compute_s(self.profile, self.layout.shape), 1e-12)
        relaxation = relax(self.layout, budget_bytes=None, scale_bytes=scale_bytes, scale_s=scale_s)
        if relaxation is None:
            return self.sections
        most = [_NUM_COLUMNS] * len(self.layout.slots)
        columns, _ = relaxation.nearest(most, max(0.0, self.peak_bytes - relaxation.bound))
        self._mend(self.sections, relaxation)
        program = Program(
            self.layout,
            columns,
            objective(self.layout, is_bound=False),
            budget_bytes=None,
            scale_bytes=scale_bytes,
            scale_s=scale_s,
            is_relaxed=False,
        )
        for _ in range(_MAX_SOLVES):
            solution = program.solve(gap_fraction=1e-3, max_nodes=20)
            if solution is None or solution.value == float("inf"):
                break
            places = self.layout.places(solution.counts)
            sections = self.layout.written_out(places)
            held = self._held(sections)
            close_bytes = round(solution.bound * (1 + _CLOSE_FRACTION))
            self._mend(sections, relaxation)
            if self.peak_bytes <= close_bytes or not add_cuts(program, places, held, close_bytes):
                break
        return self.sections

    def _held(self, sections: tuple[SectionPlan, ...]) -> StepBytes:
        return simulate_sections(self.profile, sections, **self.words)

    def _mend(self, sections: tuple[SectionPlan, ...], relaxation: Relaxation) -> None:
        """Lowers the peak of a plan, one section at a time; keeps it if it is the leanest so far."""
        held = self._held(sections)
        for _ in range(max(4, _MAX_MENDED_SECTIONS // len(sections))):
            if held.peak_bytes > 1.25 * self.peak_bytes:
                break
            better = self._mended(sections, held, relaxation)
            if better is None:
                break
            sections, held = better
        if held.peak_bytes < self.peak_bytes:
            self.sections, self.peak_bytes = sections, held.peak_bytes

    def _mended(
        self, sections: tuple[SectionPlan, ...], held: StepBytes, relaxation: Relaxation
    ) -> tuple[tuple[SectionPlan, ...], StepBytes] | None:
        """The best plan with one other section at or beside the highest peak, or None where none is lower."""
        best: tuple[tuple[SectionPlan, ...], StepBytes] | None = None
        levels = [level for found in held.passes for level in (found.forward, found.backward)]
        peaks = [max(row[position].peak_bytes for row in levels) for position in range(len(sections))]
        highest = max(range(len(sections)), key=lambda position: peaks[position])
        for position in range(max(0, highest - 1), min(len(sections), highest + 2)):
            slot = next(s for s in range(len(self.layout.slots) - 1, -1, -1) if self.layout.slots[s].first <= position)
            near = relaxation.nearest([_NUM_COLUMNS] * len(self.layout.slots), float("inf"))[0][slot]
            for column in near:
                changed = self.layout.menu(slot).section(column, sections[position].name)
                if changed != sections[position]:
                    tried = (*sections[:position], changed, *sections[position + 1 :])
                    found = self._held(tried)
                    if found.peak_bytes < (best[1] if best else held).peak_bytes:
                        best = tried, found
        return best
