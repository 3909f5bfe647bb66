"""The fastest plan of one step shape: bound, columns, program, simulator, cuts, until what the program says is so."""

import dataclasses
from typing import Any

from osdp_ray.costs import predict_sections, simulate_sections
from osdp_ray.planning.costing import objective
from osdp_ray.planning.cuts import add_cuts
from osdp_ray.planning.layout import Layout, compute_s
from osdp_ray.planning.menus import StepShape
from osdp_ray.planning.program import Program
from osdp_ray.planning.relaxation import Relaxation, relax
from osdp_ray.records.plan import Prediction, SectionPlan
from osdp_ray.records.profile import Profile

ROUNDING_FRACTION = 1e-6  # plans nearer to each other than this are equally fast


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to look. `per_slot`, `per_long_slot`: columns; `close_fraction`: a plan so near its bound will do.

    After `max_cut_rounds` solutions that broke the budget, less is asked for instead of more rows.
    """

    per_slot: int
    per_long_slot: int
    gap_fraction: float
    max_nodes: int
    max_cut_rounds: int
    close_fraction: float


# Small models with small menus exactly: those that can be enumerated. Others until more work hardly pays.
_EXACT = (
    Effort(per_slot=40, per_long_slot=0, gap_fraction=0.0, max_nodes=2000, max_cut_rounds=30, close_fraction=0.0),
    Effort(per_slot=200, per_long_slot=0, gap_fraction=0.0, max_nodes=20000, max_cut_rounds=200, close_fraction=0.0),
)
_NEAR = (
    Effort(per_slot=16, per_long_slot=0, gap_fraction=1e-6, max_nodes=100, max_cut_rounds=10, close_fraction=1e-3),
    Effort(per_slot=24, per_long_slot=0, gap_fraction=1e-5, max_nodes=10, max_cut_rounds=3, close_fraction=1.0),
)
_CLOSE = (
    Effort(per_slot=5, per_long_slot=8, gap_fraction=1e-4, max_nodes=50, max_cut_rounds=8, close_fraction=1e-3),
    Effort(per_slot=16, per_long_slot=16, gap_fraction=2e-4, max_nodes=10, max_cut_rounds=4, close_fraction=1.0),
)
_MAX_EXACT_SLOTS, _MAX_EXACT_COLUMNS = 8, 200
_MAX_MORE_ROUNDS = 6
MAX_SOLVES = 30  # of all shapes together, where it is not proven otherwise that no better plan is left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A whole model's decisions and what they cost."""

    shape: StepShape
    sections: tuple[SectionPlan, ...]
    prediction: Prediction

    @property
    def samples_per_s(self) -> float:
        return self.prediction.samples_per_s


@dataclasses.dataclass
class Tally:
    """What the solver did and proved. `bound_samples_per_s` is what no plan that was looked at can exceed."""

    solver: str = ""
    num_solves: int = 0
    num_cuts: int = 0
    bound_samples_per_s: float = 0.0


def candidate(profile: Profile, sections: tuple[SectionPlan, ...], shape: StepShape) -> Candidate:
    """Decisions with their prediction."""
    return Candidate(shape=shape, sections=sections, prediction=predict_sections(profile, sections, **as_words(shape)))


def as_words(shape: StepShape) -> dict[str, Any]:
    """A step shape as the arguments of costs' functions that tell seconds."""
    return {**bytes_words(shape), "scatter_group": shape.scatter_group}


def bytes_words(shape: StepShape) -> dict[str, Any]:
    """The same for those that tell bytes, whatever group reduces."""
    return {
        "micro_batch": shape.micro_batch,
        "accumulation": shape.accumulation,
        "synchronise": shape.synchronise,
        "prefetch": shape.prefetch,
    }


def largest_operator(profile: Profile, section_name: str = "") -> str:
    """The path of the operator with the most parameters, in a section or, where that is '', in the model."""
    best, best_bytes = "", -1
    for section in profile.sections:
        if section_name not in ("", section.name):
            continue
        section_class = profile.classes[section.class_index]
        for index, operator in enumerate(section_class.operators):
            if section_class.operator_bytes(index) > best_bytes:
                prefix = f"{section.name}." if section_class.is_block else ""
                best, best_bytes = f"{prefix}{operator.name}", section_class.operator_bytes(index)
    return best


def better(one: Candidate, other: Candidate) -> bool:
    """Faster by more than rounding; among equals the one that holds less."""
    ratio = one.samples_per_s / other.samples_per_s
    if abs(ratio - 1) > ROUNDING_FRACTION / 4:
        return ratio > 1
    return one.prediction.peak_bytes < other.prediction.peak_bytes


def _shard_bytes(profile: Profile) -> int:
    """A rank's part of the parameters, about."""
    whole = sum(profile.classes[section.class_index].parameter_bytes for section in profile.sections)
    return whole // profile.num_ranks


class ShapeSearch:
    """The search at one step shape. `bound_s` is what no plan of the shape undercuts, None where none fits."""

    def __init__(self, layout: Layout, budget_bytes: int, tally: Tally) -> None:
        self.layout, self.profile, self.shape = layout, layout.profile, layout.shape
        self.budget_bytes, self.tally = budget_bytes, tally
        # No less than every plan holds, or the numbers of a budget that is far too small are too large for solvers.
        self.scale_bytes = max(budget_bytes, _shard_bytes(self.profile))
        self.scale_s = max(compute_s(self.profile, self.shape), 1e-12)
        self.samples = self.shape.micro_batch * self.shape.accumulation * self.profile.num_ranks
        self.relaxation: Relaxation | None = self._relax(is_bound=True)
        self.bound_s = self.relaxation.bound if self.relaxation is not None else None

    def _relax(self, *, is_bound: bool) -> Relaxation | None:
        return relax(
            self.layout,
            budget_bytes=self.budget_bytes,
            scale_bytes=self.scale_bytes,
            scale_s=self.scale_s,
            is_bound=is_bound,
        )

    @property
    def bound_samples_per_s(self) -> float:
        return self.samples / self.bound_s if self.bound_s else 0.0

    def best(self, known: Candidate | None) -> Candidate | None:
        """The fastest plan that is faster than the known one, or the known one; `bound_s` rises to what is proven."""
        if self.relaxation is None or self.bound_s is None:
            return known
        best, relaxed_s = known, self.relaxation.bound
        guide = None if self._proves else self._relax(is_bound=False)
        efforts = self._efforts()
        for effort in efforts:
            room_s = self._step_s(best) - relaxed_s
            most = [effort.per_long_slot if slot.num > 1 else effort.per_slot for slot in self.layout.slots]
            columns, left_out_s = self.relaxation.nearest(most, room_s)
            if guide is not None:
                columns, _ = guide.nearest(most, float("inf"))
                left_out_s = 0.0
            if efforts is not _EXACT:
                columns = self._with_lean_ones(columns, guide or self.relaxation)
            found, proven_s = self._solve(columns, best, effort)
            if found is not None and (best is None or better(found, best)):
                best = found
            limit_s = self._step_s(best)
            self.bound_s = max(self.bound_s, min(proven_s, relaxed_s + left_out_s, limit_s))
            is_close = proven_s >= limit_s * (1 - ROUNDING_FRACTION) or efforts is not _EXACT
            if relaxed_s + left_out_s >= limit_s * (1 - ROUNDING_FRACTION / 2) and is_close:
                break  # no column that was left out can be in a faster plan
            if self.bound_s >= limit_s * (1 - effort.close_fraction):
                break
        return best

    @property
    def is_enumerable(self) -> bool:
        """Whether slots and menus are so small that the best plan is searched for until it is proven."""
        if not self.layout.is_taken_apart or len(self.layout.slots) > _MAX_EXACT_SLOTS:
            return False
        return all(menu.num_columns <= _MAX_EXACT_COLUMNS for menu in self.layout.menus)

    def _efforts(self) -> tuple[Effort, ...]:
        if not self.layout.is_taken_apart or len(self.layout.slots) > _MAX_EXACT_SLOTS:
            return _CLOSE
        return _EXACT if self.is_enumerable else _NEAR

    def _with_lean_ones(self, columns: list[list[int]], relaxation: Relaxation) -> list[list[int]]:
        """More columns, so that there is always one that is leaner: those of uniform settings, and the relaxation's."""
        found = []
        for slot, chosen in enumerate(columns):
            menu = self.layout.menu(slot)
            held = menu.persistent + menu.base[-1] + menu.kept[-1]
            leaner: list[int] = []
            for column in sorted(menu.uniform_columns(), key=lambda j: (relaxation.reduced[slot][j], j)):
                if all(held[column] < held[other] for other in leaner):
                    leaner.append(column)
            found.append(list(dict.fromkeys((*chosen, *relaxation.used[slot], *leaner))))
        return found

    @property
    def _proves(self) -> bool:
        """Whether the program's objective is exact; of long rows that overlap it is an estimate."""
        return not self.profile.overlaps or self.layout.is_taken_apart

    def _step_s(self, found: Candidate | None) -> float:
        """Seconds of a step of this shape that is as fast as a plan of any."""
        return self.samples / found.samples_per_s if found is not None else float("inf")

    def _solve(
        self, columns: list[list[int]], known: Candidate | None, effort: Effort
    ) -> tuple[Candidate | None, float]:
        """The best of these columns that is faster than the known plan, and what nothing of them undercuts."""
        budget_bytes, proven_s = self.budget_bytes, 0.0
        program = self._program(columns, known, self._proves)
        for number in range(effort.max_cut_rounds + _MAX_MORE_ROUNDS):
            if self.tally.num_solves >= MAX_SOLVES and not self.is_enumerable:
                break
            solution = program.solve(gap_fraction=effort.gap_fraction, max_nodes=effort.max_nodes)
            self.tally.num_solves += 1
            is_proof = self._proves and program.order_free and budget_bytes == self.budget_bytes
            if solution is None:
                return None, float("inf") if is_proof else proven_s
            self.tally.solver = solution.solver
            if is_proof:
                proven_s = max(proven_s, solution.bound)
            if solution.value == float("inf"):
                break
            places = self.layout.places(solution.counts)
            sections = self.layout.written_out(places)
            held = simulate_sections(self.profile, sections, **bytes_words(self.shape))
            if held.peak_bytes <= self.budget_bytes:
                return candidate(self.profile, sections, self.shape), proven_s
            added = add_cuts(program, places, held, self.budget_bytes)
            self.tally.num_cuts += added
            if not added or number >= effort.max_cut_rounds:  # nothing is left but to ask for less
                budget_bytes -= held.peak_bytes - self.budget_bytes
                program.lower_budget(budget_bytes)
        return None, proven_s

    def _program(self, columns: list[list[int]], known: Candidate | None, proves: bool) -> Program:
        program = Program(
            self.layout,
            columns,
            objective(self.layout, is_bound=False),
            budget_bytes=self.budget_bytes,
            scale_bytes=self.scale_bytes,
            scale_s=self.scale_s,
            is_relaxed=False,
        )
        if known is not None:
            slack = 1.0 if proves else 1.02  # an estimate may be a little above what it estimates
            program.faster_than(self.samples / known.samples_per_s * slack)
        return program
