"""Stage 3: a Profile and a budget -> the Plan with the most samples per second that fits.

For every step shape (micro-batch, accumulation, which micro-batches synchronise) that makes the global batch: a bound
from the linear relaxation over whole menus (`relaxation.py`); then, the most promising shape first and none whose
bound is below the best plan so far, the integer program over the columns that can matter (`program.py`), the plan
written out position by position, and the simulator's peak for it, which adds cuts where it breaks the budget.
"""

import dataclasses

from osdp_ray.costs import predict, tensor_budget_bytes
from osdp_ray.errors import UsageError
from osdp_ray.planning.layout import build_layout, compute_s
from osdp_ray.planning.lean import infeasible, leanest
from osdp_ray.planning.menus import StepShape
from osdp_ray.planning.polish import polished
from osdp_ray.planning.search import MAX_SOLVES, ROUNDING_FRACTION, ShapeSearch, Tally, better, candidate
from osdp_ray.planning.search import Candidate as _Candidate
from osdp_ray.planning.shapes import batch_shapes, step_shapes
from osdp_ray.planning.uniform import uniform_plans
from osdp_ray.records.plan import Plan, ScatterGroup, SectionPlan, SolverReport
from osdp_ray.records.profile import Profile

__all__ = ["batch_shapes", "plan"]


def plan(
    profile: Profile,
    *,
    budget_bytes: int,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    prefetch: int | None = None,
    scatter_group: ScatterGroup = "shared",
) -> Plan:
    """The fastest plan whose peak fits `budget_bytes` on every device.

    `global_batch` samples make a step; where it is None a step is one micro-batch per rank. `micro_batch` fixes what
    is free otherwise. `prefetch` and `scatter_group` are those of the plan: without the first FSDP2's one unit where
    computing hides it, else none, which holds less and takes as long. Raises UsageError for batches that do not divide
    and a prefetch that cannot be, InfeasibleError where no plan fits (with the smallest budget that does), SolverError.
    """
    if budget_bytes <= 0:
        raise UsageError(f"a budget of {budget_bytes} bytes holds nothing. Give --memory-budget a size, such as 2GiB.")
    shapes = step_shapes(
        profile,
        global_batch=global_batch,
        micro_batch=micro_batch,
        prefetch=prefetch,
        scatter_group=scatter_group,
    )
    limit_bytes = tensor_budget_bytes(profile, budget_bytes, scatter_group)
    uniform = uniform_plans(profile, [shape for shape in shapes if shape.synchronise == "every"], limit_bytes)
    best: _Candidate | None = None
    for _, found in uniform:
        if found is not None and (best is None or better(found, best)):
            best = found
    tally = Tally()
    lean = leanest(profile, shapes) if best is None else None
    if lean is not None:
        best = _fastest(profile, lean.sections, shapes, limit_bytes)
    if limit_bytes > 0:
        best = _search(profile, shapes, limit_bytes, best, tally)
    if best is None:
        raise infeasible(profile, lean or leanest(profile, shapes), budget_bytes)
    best = polished(profile, best, limit_bytes)
    made = Plan(
        workload=profile.workload,
        workload_hash=profile.workload_hash,
        ranks_per_node=profile.ranks_per_node,
        precision=profile.precision,
        budget_bytes=budget_bytes,
        global_batch=best.shape.micro_batch * best.shape.accumulation * profile.num_ranks,
        micro_batch=best.shape.micro_batch,
        accumulation=best.shape.accumulation,
        synchronise=best.shape.synchronise,
        sections=best.sections,
        prediction=best.prediction,
        alternatives=tuple(alternative for alternative, _ in uniform),
        solver=_report(tally, best.samples_per_s),
        prefetch=best.shape.prefetch,
        scatter_group=scatter_group,
        parameter_counts=profile.parameter_counts,
    )
    return dataclasses.replace(made, prediction=predict(profile, made))


def _fastest(
    profile: Profile, sections: tuple[SectionPlan, ...], shapes: list[StepShape], budget_bytes: int
) -> _Candidate | None:
    """These decisions at the fastest shape that fits, or None."""
    found = [candidate(profile, sections, shape) for shape in shapes]
    fitting = [one for one in found if one.prediction.peak_bytes <= budget_bytes]
    return max(fitting, key=lambda one: one.samples_per_s, default=None)


def _search(
    profile: Profile, shapes: list[StepShape], budget_bytes: int, best: _Candidate | None, tally: Tally
) -> _Candidate | None:
    """The fastest plan of all shapes, the known one included."""

    def promised(shape: StepShape) -> float:
        seconds = compute_s(profile, shape)
        samples = shape.micro_batch * shape.accumulation * profile.num_ranks
        return samples / seconds if seconds else float("inf")

    searches = []
    for shape in sorted(shapes, key=lambda shape: -promised(shape)):
        if best is None or promised(shape) > best.samples_per_s:
            search = ShapeSearch(build_layout(profile, shape), budget_bytes, tally)
            if search.bound_s is not None:
                searches.append(search)
    searches.sort(key=lambda search: -search.bound_samples_per_s)
    for search in searches:
        if best is None or search.bound_samples_per_s > best.samples_per_s * (1 + ROUNDING_FRACTION / 2):
            if best is None or tally.num_solves < MAX_SOLVES or search.is_enumerable:
                best = search.best(best)
            tally.bound_samples_per_s = max(tally.bound_samples_per_s, search.bound_samples_per_s)
    return best


def _report(tally: Tally, samples_per_s: float) -> SolverReport:
    """Optimal where nothing can be faster, up to rounding."""
    gap = max(0.0, tally.bound_samples_per_s / samples_per_s - 1)
    proven = gap < ROUNDING_FRACTION
    return SolverReport(
        solver=tally.solver or "none needed",
        status="optimal" if proven else "feasible",
        gap_fraction=0.0 if proven else gap,
        num_solves=tally.num_solves,
        num_cuts=tally.num_cuts,
    )
