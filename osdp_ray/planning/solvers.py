"""Running a program: HiGHS, or CBC where HiGHS is missing (or OSDP_SOLVER says so).

Work is limited by nodes of the search tree, never by time, so that the same program ends the same on any machine.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import pulp

from osdp_ray.errors import SolverError

_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A solved program's objective and what no solution goes below."""

    value: float
    bound: float
    solver: str


class _Highs(pulp.HiGHS):
    """PuLP's HiGHS, which has no word for a search that ended at its node limit."""

    def findSolutionValues(self, lp: Any) -> Any:
        try:
            return super().findSolutionValues(lp)
        except KeyError:
            found = lp.solverModel.getInfo().objective_function_value < 1e300
            if found:
                return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def run_solver(
    model: pulp.LpProblem, *, is_integer: bool, gap_fraction: float = 0.0, max_nodes: int = 5000
) -> Outcome | None:
    """Solves a model; its variables and duals hold the solution. None where it is infeasible.

    A search that ended at its node limit without a solution has the value infinity. Raises SolverError.
    """
    name, solver = _solver(is_integer, gap_fraction, max_nodes)
    try:
        with _silenced():
            model.solve(solver)
            if name == "HiGHS" and model.solverModel.getModelStatus().name == "kSolveError":  # of presolving, at times
                model.solve(_highs(is_integer, gap_fraction, max_nodes, presolve="off"))
    except pulp.PulpSolverError as error:
        raise SolverError(name, f"it failed ({error})", "Install another one: pip install highspy") from error
    if model.sol_status == pulp.LpSolutionInfeasible or model.status == pulp.LpStatusInfeasible:
        return None
    if model.sol_status == pulp.LpSolutionNoSolutionFound and is_integer:  # the node limit came first
        bound = float(model.solverModel.getInfo().mip_dual_bound) if name == "HiGHS" else float("-inf")
        return Outcome(value=float("inf"), bound=bound, solver=name)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverError(
            name,
            f"it ended as {pulp.LpSolution[model.sol_status]!r}",
            "Raise the budget a little, or install another solver: pip install highspy",
        )
    value = float(pulp.value(model.objective))
    bound = value
    if is_integer and name == "HiGHS":
        bound = float(model.solverModel.getInfo().mip_dual_bound)
    elif is_integer:
        bound = value * (1 - gap_fraction) if model.sol_status == pulp.LpSolutionOptimal else float("-inf")
    return Outcome(value=value, bound=min(bound, value), solver=name)


def _solver(is_integer: bool, gap: float, max_nodes: int) -> tuple[str, pulp.LpSolver]:
    wanted = os.environ.get("OSDP_SOLVER", "")
    candidates = {
        "HiGHS": lambda: _highs(is_integer, gap, max_nodes),
        "CBC": lambda: _cbc(is_integer, gap, max_nodes),
    }
    if wanted and wanted not in candidates:
        raise SolverError(wanted, "OSDP_SOLVER names it and it is not known", f"Use one of {', '.join(candidates)}")
    for name, make in candidates.items():
        if wanted in ("", name):
            solver = make()
            if solver is not None and solver.available():
                return name, solver
    raise SolverError(wanted or "HiGHS and CBC", "not installed", "pip install highspy")


def _highs(is_integer: bool, gap: float, max_nodes: int, **options: str) -> pulp.LpSolver:
    return _Highs(
        msg=False,
        mip=is_integer,
        gapRel=gap,
        gapAbs=1e-6,
        threads=1,
        random_seed=0,
        mip_max_nodes=max_nodes,
        mip_feasibility_tolerance=_TOLERANCE,
        primal_feasibility_tolerance=_TOLERANCE,
        dual_feasibility_tolerance=_TOLERANCE,
        **options,
    )


def _cbc(is_integer: bool, gap: float, max_nodes: int) -> pulp.LpSolver | None:
    """The CBC on the path, or the one that PuLP's wheels carry as long as they do."""
    path = pulp.COIN_CMD.pulp_cbc_path if hasattr(pulp.COIN_CMD, "pulp_cbc_path") else None
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", path)
    for place in (None, bundled):
        solver = pulp.COIN_CMD(
            msg=False,
            mip=is_integer,
            path=place,
            gapRel=gap,
            gapAbs=1e-6,
            threads=None,
            maxNodes=max_nodes,
            options=["primalTolerance", str(_TOLERANCE)],
        )
        if solver.available():
            return solver
    return None


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """HiGHS prints a banner from its constructor, whatever its options say; standard output belongs to the caller."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
