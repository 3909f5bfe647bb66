"""Stage 3: a Profile and a budget -> the Plan with the most samples per second that fits.

For every micro-batch that divides the global batch: the menus, the integer program (`solve.py`), the plan written out
position by position, and the simulator's peak for it. Seconds per sample over the whole step decide between
micro-batches; those whose computing alone takes longer than the best plan so far are not solved. The program never
overestimates a peak, so a plan of it that the simulator lets pass is optimal, and one that it does not adds cuts.
"""

import dataclasses
from collections.abc import Iterator

from osdp_ray.costs import StepBytes, predict, predict_sections, simulate_sections, tensor_budget_bytes
from osdp_ray.errors import InfeasibleError, UsageError
from osdp_ray.planning.menus import (
    CHOICES,
    DP,
    RECOMPUTES,
    ZERO2,
    ZERO3,
    build_menu,
    uniform_sections,
)
from osdp_ray.planning.solve import Cut, Problem, Solution, Stretch, leanest, solve
from osdp_ray.records.plan import Alternative, Plan, Prediction, SectionPlan, SolverReport
from osdp_ray.records.profile import Profile

__all__ = ["plan"]

_MAX_SOLVES = 12  # at a micro-batch
_MAX_SOLVES_WITHOUT_PLAN = 60  # where no plan is known that fits
_MAX_FREE_MICRO_BATCH = 512
_UNIFORM = {"DP": DP, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A whole model's decisions and what they cost."""

    micro_batch: int
    accumulation: int
    sections: tuple[SectionPlan, ...]
    prediction: Prediction


@dataclasses.dataclass
class _Tally:
    """What the solver did and proved. `bound_samples_per_s` is what no plan that was looked at can exceed."""

    solver: str = ""
    num_solves: int = 0
    num_cuts: int = 0
    solve_s: float = 0.0
    bound_samples_per_s: float = 0.0

    def count(self, solution: Solution | None) -> None:
        self.num_solves += 1
        if solution is not None:
            self.solver = solution.solver
            self.solve_s += solution.solve_s

    def report(self, samples_per_s: float) -> SolverReport:
        """Optimal where nothing can be faster, up to rounding."""
        gap = max(0.0, self.bound_samples_per_s / samples_per_s - 1)
        return SolverReport(
            solver=self.solver or "none needed",
            status="optimal" if gap < 1e-6 else "feasible",
            gap_fraction=0.0 if gap < 1e-6 else gap,
            num_solves=self.num_solves,
            num_cuts=self.num_cuts,
            solve_s=self.solve_s,
        )


def plan(
    profile: Profile, *, budget_bytes: int, global_batch: int | None = None, micro_batch: int | None = None
) -> Plan:
    """The fastest plan whose peak fits `budget_bytes` on every device.

    `global_batch` samples make a step; where it is None a step is one micro-batch per rank. `micro_batch` fixes what
    is free otherwise. Raises UsageError for batches that do not divide, InfeasibleError where no plan fits (with the
    smallest budget that would), SolverError.
    """
    if budget_bytes <= 0:
        raise UsageError(f"a budget of {budget_bytes} bytes holds nothing. Give --memory-budget a size, such as 2GiB.")
    shapes = list(batch_shapes(profile.num_ranks, global_batch, micro_batch))
    tally = _Tally()
    limit_bytes = tensor_budget_bytes(profile, budget_bytes)
    uniform = [_uniform(profile, name, recompute, shapes, limit_bytes) for name in _UNIFORM for recompute in RECOMPUTES]
    best = max(
        (candidate for _, candidate in uniform if candidate is not None),
        key=lambda candidate: candidate.prediction.samples_per_s,
        default=None,
    )
    for shape in sorted(shapes, key=lambda shape: -_bound(profile, *shape)):
        if best is None or _bound(profile, *shape) > best.prediction.samples_per_s:
            found = _best_at(profile, *shape, limit_bytes, tally, best)
            if found is not None and (best is None or _better(found, best)):
                best = found
    if best is None:
        best = _leanest(profile, *shapes[0])
        if best.prediction.peak_bytes > limit_bytes:
            raise _infeasible(profile, best.prediction, budget_bytes)
    made = Plan(
        workload=profile.workload,
        workload_hash=profile.workload_hash,
        ranks_per_node=profile.ranks_per_node,
        precision=profile.precision,
        budget_bytes=budget_bytes,
        global_batch=best.micro_batch * best.accumulation * profile.num_ranks,
        micro_batch=best.micro_batch,
        accumulation=best.accumulation,
        synchronise="every",
        sections=best.sections,
        prediction=best.prediction,
        alternatives=tuple(alternative for alternative, _ in uniform),
        solver=tally.report(best.prediction.samples_per_s),
    )
    return dataclasses.replace(made, prediction=predict(profile, made))


def batch_shapes(num_ranks: int, global_batch: int | None, micro_batch: int | None) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulation) pairs that make the global batch exactly, large micro-batches last."""
    if global_batch is None:
        sizes = [micro_batch] if micro_batch else [1 << power for power in range(_MAX_FREE_MICRO_BATCH.bit_length())]
        yield from ((size, 1) for size in sizes)
        return
    if global_batch <= 0 or (micro_batch is not None and micro_batch <= 0):
        raise UsageError("--global-batch and --micro-batch count samples: give numbers above 0.")
    unit = num_ranks * (micro_batch or 1)
    if global_batch % unit:
        lower, upper = global_batch // unit * unit, (global_batch // unit + 1) * unit
        fitting = f"{lower} or {upper}" if lower else str(upper)
        each = f" x micro-batch {micro_batch}" if micro_batch else ""
        raise UsageError(
            f"a global batch of {global_batch} does not divide among {num_ranks} workers{each}. "
            f"Use --global-batch {fitting}, or another --num-workers" + (" or --micro-batch." if micro_batch else ".")
        )
    per_rank = global_batch // num_ranks
    sizes = [micro_batch] if micro_batch else [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    yield from ((size, per_rank // size) for size in sizes)


def _better(one: _Candidate, other: _Candidate) -> bool:
    """Faster by more than rounding; among equals the one that holds less."""
    ratio = one.prediction.samples_per_s / other.prediction.samples_per_s
    if abs(ratio - 1) > 1e-9:
        return ratio > 1
    return one.prediction.peak_bytes < other.prediction.peak_bytes


def _candidate(profile: Profile, sections: tuple[SectionPlan, ...], micro_batch: int, accumulation: int) -> _Candidate:
    prediction = predict_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation)
    return _Candidate(micro_batch=micro_batch, accumulation=accumulation, sections=sections, prediction=prediction)


def _uniform(
    profile: Profile, name: str, recompute: str, shapes: list[tuple[int, int]], budget_bytes: int
) -> tuple[Alternative, _Candidate | None]:
    """A uniform setting at its own best micro-batch; its leanest peak where it fits with none."""
    sections = uniform_sections(profile, _UNIFORM[name], recompute)  # type: ignore[arg-type]
    best: _Candidate | None = None
    smallest_bytes: int | None = None
    for micro_batch, accumulation in shapes:
        candidate = _candidate(profile, sections, micro_batch, accumulation)
        peak_bytes = candidate.prediction.peak_bytes
        smallest_bytes = peak_bytes if smallest_bytes is None else min(smallest_bytes, peak_bytes)
        if peak_bytes > budget_bytes:
            break  # larger micro-batches hold more
        if best is None or _better(candidate, best):
            best = candidate
    label = name if recompute == "none" else f"{name} + {recompute} recompute"
    alternative = Alternative(
        name=label,
        micro_batch=best.micro_batch if best else None,
        peak_bytes=best.prediction.peak_bytes if best else smallest_bytes or 0,
        step_s=best.prediction.step_s if best else None,
        samples_per_s=best.prediction.samples_per_s if best else None,
    )
    return alternative, best


def _bound(profile: Profile, micro_batch: int, accumulation: int) -> float:
    """Samples per second that no plan at this micro-batch can exceed: computing alone, nothing recomputed."""
    factor = profile.calibration.compute_factor
    compute_s = sum(
        profile.compute[section.class_index].forward_s(micro_batch)
        + profile.compute[section.class_index].backward_s(micro_batch)
        for section in profile.sections
    )
    return micro_batch * profile.num_ranks / (compute_s * factor) if compute_s else float("inf")


def _problem(profile: Profile, micro_batch: int, accumulation: int) -> Problem:
    classes = range(len(profile.classes))
    return Problem(
        menus=tuple(build_menu(profile, c, micro_batch=micro_batch, accumulation=accumulation) for c in classes),
        counts=tuple(sum(section.class_index == c for section in profile.sections) for c in classes),
        fixed_bytes=profile.buffer_bytes
        + profile.calibration.peak_offset_bytes
        + micro_batch * profile.batch_bytes_per_sample,
        step_bytes_per_gradient=profile.optimizer.step_bytes_per_total,
    )


def _best_at(
    profile: Profile, micro_batch: int, accumulation: int, budget_bytes: int, tally: _Tally, best: _Candidate | None
) -> _Candidate | None:
    """The fastest plan at one micro-batch that is faster than the best so far.

    The program's rows are exact or too low, so the first of its plans that the simulator lets pass is the best one.
    Each one that breaks the budget adds what it taught: the peaks at borders between stretches.
    """
    problem = _problem(profile, micro_batch, accumulation)
    samples = micro_batch * accumulation * profile.num_ranks
    limit_s = samples / best.prediction.samples_per_s if best is not None else None
    limit_bytes, bound = budget_bytes, 0.0
    for number in range(_MAX_SOLVES if best is not None else _MAX_SOLVES_WITHOUT_PLAN):
        solution = solve(problem, budget_bytes=limit_bytes, limit_s=limit_s)
        tally.count(solution)
        if solution is None:
            if limit_bytes < budget_bytes or number >= _MAX_SOLVES:  # else it is proven that nothing faster fits
                tally.bound_samples_per_s = max(tally.bound_samples_per_s, bound)
            return None
        recipes = _assign(profile, solution)
        sections = _write_out(profile, problem, recipes)
        held = simulate_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation)
        fits = held.peak_bytes <= budget_bytes
        if limit_bytes == budget_bytes and number < _MAX_SOLVES:
            bound = samples / solution.bound_s
        if fits:
            tally.bound_samples_per_s = max(tally.bound_samples_per_s, bound)
            return _candidate(profile, sections, micro_batch, accumulation)
        cuts = _cuts(held, recipes, budget_bytes - profile.calibration.peak_offset_bytes)
        new = tuple(cut for cut in cuts if cut not in problem.cuts)
        tally.num_cuts += len(new)
        problem = dataclasses.replace(problem, cuts=problem.cuts + new)
        if not new:  # what broke the budget is no border: nothing is left but to ask for less
            limit_bytes -= held.peak_bytes - budget_bytes
    tally.bound_samples_per_s = max(tally.bound_samples_per_s, bound)
    return None


def _cuts(held: StepBytes, recipes: list[Stretch], budget_bytes: int) -> list[Cut]:
    """The borders whose peaks break the budget: where a section's neighbour in that pass is of another stretch."""
    cuts = []
    for in_backward, levels in ((False, held.forward), (True, held.backward)):
        for position, level in enumerate(levels):
            other = position + 1 if in_backward else position - 1
            if level.peak_bytes <= budget_bytes or not 0 <= other < len(recipes):
                continue
            if recipes[other] != recipes[position]:
                cuts.append(
                    Cut(
                        in_backward=in_backward,
                        stretch=recipes[position],
                        neighbour=recipes[other],
                        num_bytes=level.peak_bytes - level.before_bytes,
                    )
                )
    return cuts


def _assign(profile: Profile, solution: Solution) -> list[Stretch]:
    """Which recipe each section uses: along each class, recipes in their canonical order."""
    queues = [
        [(c, r) for r, number in enumerate(counts) for _ in range(number)] for c, counts in enumerate(solution.counts)
    ]
    return [queues[section.class_index].pop(0) for section in profile.sections]


def _write_out(profile: Profile, problem: Problem, recipes: list[Stretch]) -> tuple[SectionPlan, ...]:
    """A plan for every section."""
    return tuple(
        problem.menus[c][r].section(section.name, is_block=profile.classes[c].is_block)
        for section, (c, r) in zip(profile.sections, recipes, strict=True)
    )


def _leanest(profile: Profile, micro_batch: int, accumulation: int) -> _Candidate:
    """The plan with the lowest peak at a micro-batch: of the program's and the uniform ones."""
    problem = _problem(profile, micro_batch, accumulation)
    candidates = [
        _candidate(
            profile, _write_out(profile, problem, _assign(profile, leanest(problem))), micro_batch, accumulation
        ),
        *(
            _candidate(profile, uniform_sections(profile, choice, recompute), micro_batch, accumulation)
            for choice in CHOICES
            for recompute in RECOMPUTES
        ),
    ]
    return min(candidates, key=lambda candidate: candidate.prediction.peak_bytes)


def _infeasible(profile: Profile, lean: Prediction, budget_bytes: int) -> InfeasibleError:
    """The error with the smallest budget that fits, found with the smallest micro-batch."""
    phase = max(lean.peak_by_phase, key=lambda phase: lean.peak_by_phase[phase])
    return InfeasibleError(budget_bytes, lean.device_bytes, phase, _largest_operator(profile))


def _largest_operator(profile: Profile) -> str:
    """The path of the operator with the most parameters."""
    best, best_bytes = "", -1
    for section in profile.sections:
        section_class = profile.classes[section.class_index]
        for index, operator in enumerate(section_class.operators):
            if section_class.operator_bytes(index) > best_bytes:
                prefix = f"{section.name}." if section_class.is_block else ""
                best, best_bytes = f"{prefix}{operator.name}", section_class.operator_bytes(index)
    return best
