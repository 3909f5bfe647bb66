"""Stage 3: a Profile and a budget -> the Plan with the most samples per second that fits.

For every micro-batch that divides the global batch: the menus, the integer program (`solve.py`), the plan written out
position by position, and the simulator's peak for it. Seconds per sample over the whole step decide between
micro-batches; those whose computing alone takes longer than the best plan so far are not solved. A plan is called
optimal where a program that can only underestimate the peak finds nothing faster.
"""

import dataclasses
from collections.abc import Iterator

from osdp_ray.costs import predict_sections
from osdp_ray.errors import InfeasibleError, UsageError
from osdp_ray.planning.menus import (
    CHOICES,
    DP,
    RECOMPUTES,
    ZERO2,
    ZERO3,
    Recipe,
    build_menu,
    uniform_sections,
)
from osdp_ray.planning.solve import Problem, Solution, leanest, solve
from osdp_ray.records.plan import Alternative, Plan, Prediction, SectionPlan, SolverReport
from osdp_ray.records.profile import Profile

__all__ = ["plan"]

_MAX_CUTS = 3
_LIMIT_SLACK_FRACTION = 0.15  # how far above the budget the program's own, pessimistic peak is looked at
_LIMIT_STEP_FRACTION = 0.01
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
    uniform = [
        _uniform(profile, name, recompute, shapes, budget_bytes) for name in _UNIFORM for recompute in RECOMPUTES
    ]
    best = max(
        (candidate for _, candidate in uniform if candidate is not None),
        key=lambda candidate: candidate.prediction.samples_per_s,
        default=None,
    )
    for shape in sorted(shapes, key=lambda shape: -_bound(profile, *shape)):
        if best is None or _bound(profile, *shape) > best.prediction.samples_per_s:
            found = _best_at(profile, *shape, budget_bytes, tally, best)
            if found is not None and (best is None or _better(found, best)):
                best = found
    if best is None:
        best = _leanest(profile, *shapes[0])
        if best.prediction.peak_bytes > budget_bytes:
            raise _infeasible(profile, best.prediction, budget_bytes)
    return Plan(
        workload=profile.workload,
        workload_hash=profile.workload_hash,
        ranks_per_node=profile.ranks_per_node,
        budget_bytes=budget_bytes,
        global_batch=best.micro_batch * best.accumulation * profile.num_ranks,
        micro_batch=best.micro_batch,
        accumulation=best.accumulation,
        sections=best.sections,
        prediction=best.prediction,
        alternatives=tuple(alternative for alternative, _ in uniform),
        solver=tally.report(best.prediction.samples_per_s),
    )


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
    label = name if recompute == "none" else f"{name} + recompute"
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

    The program without neighbours is a lower bound: if its plan fits, it is proven best. Else the program with
    neighbours is solved under limits between the budget and where the simulator agrees, by bisection.
    """
    problem = _problem(profile, micro_batch, accumulation)
    samples = micro_batch * accumulation * profile.num_ranks
    limit_s = samples / best.prediction.samples_per_s if best is not None else None

    def solve_under(program: Problem, limit_bytes: int) -> tuple[Solution | None, _Candidate | None]:
        solution = solve(program, budget_bytes=limit_bytes, limit_s=limit_s)
        tally.count(solution)
        if solution is None:
            return None, None
        sections = _write_out(profile, program, solution)
        return solution, _candidate(profile, sections, micro_batch, accumulation)

    solution, candidate = solve_under(problem.without_neighbours(), budget_bytes)
    if solution is None or candidate is None:
        return None
    tally.bound_samples_per_s = max(tally.bound_samples_per_s, samples / solution.bound_s)
    if candidate.prediction.peak_bytes <= budget_bytes:
        return candidate
    found: _Candidate | None = None
    fits_bytes, breaks_bytes = 0, round(budget_bytes * (1 + _LIMIT_SLACK_FRACTION))
    limit_bytes = budget_bytes
    for _ in range(_MAX_CUTS):
        _, candidate = solve_under(problem, limit_bytes)
        tally.num_cuts += 1
        excess_bytes = 0 if candidate is None else candidate.prediction.peak_bytes - budget_bytes
        if excess_bytes > 0:
            breaks_bytes = limit_bytes
            limit_bytes = (fits_bytes + breaks_bytes) // 2 if fits_bytes else limit_bytes - excess_bytes
        else:
            if candidate is not None and (found is None or _better(candidate, found)):
                found = candidate
            fits_bytes = limit_bytes
            limit_bytes = (fits_bytes + breaks_bytes) // 2
        if breaks_bytes - fits_bytes < _LIMIT_STEP_FRACTION * budget_bytes:
            break
    return found


def _write_out(profile: Profile, problem: Problem, solution: Solution) -> tuple[SectionPlan, ...]:
    """Counts -> a plan for every section: along each class, recipes in their canonical order."""
    queues: list[list[Recipe]] = [
        [recipe for recipe, number in zip(menu, counts, strict=True) for _ in range(number)]
        for menu, counts in zip(problem.menus, solution.counts, strict=True)
    ]
    return tuple(
        queues[section.class_index].pop(0).section(section.name, is_block=profile.classes[section.class_index].is_block)
        for section in profile.sections
    )


def _leanest(profile: Profile, micro_batch: int, accumulation: int) -> _Candidate:
    """The plan with the lowest peak at a micro-batch: of the program's and the uniform ones."""
    problem = _problem(profile, micro_batch, accumulation)
    candidates = [
        _candidate(profile, _write_out(profile, problem, leanest(problem)), micro_batch, accumulation),
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
    return InfeasibleError(budget_bytes, lean.peak_bytes, phase, _largest_operator(profile))


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
