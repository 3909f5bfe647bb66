"""The integer program: which recipe how often, for one micro-batch, as fast as the budget allows.

Sets: section classes c with num[c] sections, and for each its menu of recipes r. Stretches g = (c, r) are in canonical
order along the model: classes by first appearance, recipes by Recipe.order.

    choose   n[g]    in 0..num[c]   how many sections of class c use recipe r
             used[g] in {0, 1}      whether any does
    minimize sum n[g] * seconds[g]
    subject to
      (all_c)       sum over g of c of n[g] = num[c]
      (used_g)      n[g] <= num[c] * used[g]
    and with P = fixed + sum n[h] * persistent[h]:
      (forward_g)   P + sum_{h<=g} n[h] kept[h] + used[g] (forward[g] - kept[g])                        <= budget
      (first_g)     P + sum_{h<=g} n[h] kept[h] + sum_{h>g} n[h] gradient[h] + used[g] backward[g]      <= budget
      (last_g)      P + sum_{h<g} n[h] kept[h] + sum_{h>=g} n[h] gradient[h]
                      + used[g] (kept[g] - gradient[g] + backward[g])                                   <= budget
      (optimizer)   P + sum n[h] (1 + step_per_total) gradient[h]                                       <= budget

`first` and `last` are the first and last block of a stretch in backward: within a stretch the level is linear, so the
peak is at one of its ends. Where a stretch is empty its rows state the level at a border that is passed in any case, so
no big constants are needed. Bytes are in MiB for the solver; plans are checked by the simulator outside it.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator

import pulp

from osdp_ray.errors import SolverError
from osdp_ray.planning.menus import Recipe
from osdp_ray.units import MIB

TIME_LIMIT_S = 20.0
LEANEST_GAP_FRACTION = 0.002
_BIG = 1e-9  # preference for lean plans among equals, in seconds per MiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One program: menus and section counts by class, the bytes that are there in any case, and the budget."""

    menus: tuple[tuple[Recipe, ...], ...]
    counts: tuple[int, ...]
    fixed_bytes: int
    step_bytes_per_gradient: float

    def without_neighbours(self) -> "Problem":
        """The same program with peaks that can only be too low."""
        menus = tuple(tuple(recipe.without_neighbours() for recipe in menu) for menu in self.menus)
        return dataclasses.replace(self, menus=menus)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """How often each recipe of each class is used; no counts that fit take less than `bound_s`."""

    counts: tuple[tuple[int, ...], ...]
    seconds: float
    bound_s: float
    solver: str
    solve_s: float


def solve(problem: Problem, *, budget_bytes: int, limit_s: float | None = None) -> Solution | None:
    """The fastest counts that fit and take at most `limit_s`, or None where none do. Raises SolverError."""
    model, counts = _program(problem, budget_bytes)
    if limit_s is not None:
        taken = pulp.lpSum(
            g.seconds * n
            for menu, row in zip(problem.menus, counts, strict=True)
            for g, n in zip(menu, row, strict=True)
        )
        model += taken <= limit_s, "limit"
    model.setObjective(
        pulp.lpSum(
            (recipe.seconds + _BIG * recipe.persistent_bytes / MIB) * counts[c][r]
            for c, menu in enumerate(problem.menus)
            for r, recipe in enumerate(menu)
        )
    )
    return _run(model, counts, problem)


def leanest(problem: Problem) -> Solution:
    """The counts with the lowest peak, whatever they take: the program with the budget as its objective."""
    model, counts = _program(problem, None)
    model.setObjective(model.variablesDict()["budget"])
    solution = _run(model, counts, problem, gap_fraction=LEANEST_GAP_FRACTION)
    if solution is None:
        raise SolverError("HiGHS", "it found no plan at all for an unlimited budget", "Please report this profile")
    return solution


def _program(problem: Problem, budget_bytes: int | None) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable]]]:
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    counts: list[list[pulp.LpVariable]] = []
    used: list[list[pulp.LpVariable]] = []
    for c, (menu, num) in enumerate(zip(problem.menus, problem.counts, strict=True)):
        counts.append([model.add_variable(f"n_{c}_{r}", 0, num, cat="Integer") for r in range(len(menu))])
        if num == 1:
            used.append(counts[c])
        else:
            used.append([model.add_variable(f"used_{c}_{r}", cat="Binary") for r in range(len(menu))])
            for r in range(len(menu)):
                model += counts[c][r] <= num * used[c][r], f"used_{c}_{r}_row"
        model += pulp.lpSum(counts[c]) == num, f"all_{c}"
    _memory_rows(model, problem, counts, used, budget_bytes)
    return model, counts


def _memory_rows(
    model: pulp.LpProblem,
    problem: Problem,
    counts: list[list[pulp.LpVariable]],
    used: list[list[pulp.LpVariable]],
    budget_bytes: int | None,
) -> None:
    stretches = [(c, r, recipe) for c, menu in enumerate(problem.menus) for r, recipe in enumerate(menu)]
    # Running sums are variables of their own, so that every row has a handful of entries instead of one per recipe.
    persistent = model.add_variable("persistent", 0)
    model += (
        persistent
        == problem.fixed_bytes / MIB + pulp.lpSum(counts[c][r] * (g.persistent_bytes / MIB) for c, r, g in stretches),
        "persistent_sum",
    )
    gradients = model.add_variable("gradients", 0)
    model += (
        gradients == pulp.lpSum(counts[c][r] * (g.gradient_bytes / MIB) for c, r, g in stretches),
        "gradients_sum",
    )
    limit = model.add_variable("budget", 0) if budget_bytes is None else budget_bytes / MIB
    kept_level: pulp.LpAffineExpression | pulp.LpVariable = persistent
    level = persistent + gradients  # before the first block's backward ends: nothing kept, all gradients there
    for index, (c, r, recipe) in enumerate(stretches):
        n, u = counts[c][r], used[c][r]
        kept, gradient = recipe.kept_bytes / MIB, recipe.gradient_bytes / MIB
        forward, backward = recipe.forward_bytes / MIB, recipe.backward_bytes / MIB
        # kept_after[g] = P + kept of g and before; after[g] = that plus the gradients behind g
        kept_after = model.add_variable(f"kept_{index}", 0)
        after = model.add_variable(f"level_{index}", 0)
        model += kept_after == kept_level + n * kept, f"kept_{index}_row"
        model += after == level + n * kept - n * gradient, f"level_{index}_row"
        model += kept_after + u * (forward - kept) <= limit, f"forward_{c}_{r}"
        model += after + u * backward <= limit, f"first_{c}_{r}"
        if problem.counts[c] > 1:
            model += level + u * (kept - gradient + backward) <= limit, f"last_{c}_{r}"
        kept_level, level = kept_after, after
    model += persistent + (1 + problem.step_bytes_per_gradient) * gradients <= limit, "optimizer"


def _run(
    model: pulp.LpProblem, counts: list[list[pulp.LpVariable]], problem: Problem, *, gap_fraction: float = 0.0
) -> Solution | None:
    name, solver = _solver(gap_fraction)
    started = time.perf_counter()
    try:
        with _silenced():
            model.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(name, f"it failed ({error})", "Install another one: pip install highspy") from error
    solve_s = time.perf_counter() - started
    if model.sol_status == pulp.LpSolutionInfeasible or model.status == pulp.LpStatusInfeasible:
        return None
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverError(
            name,
            f"it ended as {pulp.LpSolution[model.sol_status]!r} after {solve_s:.1f} s",
            "Raise the budget a little, or install another solver: pip install highspy",
        )
    chosen = tuple(tuple(round(variable.value() or 0) for variable in row) for row in counts)
    seconds = sum(problem.menus[c][r].seconds * number for c, row in enumerate(chosen) for r, number in enumerate(row))
    proven = model.sol_status == pulp.LpSolutionOptimal
    # A solve that ran out of time proves nothing but that every section takes at least its fastest recipe.
    fastest = sum(min(r.seconds for r in menu) * n for menu, n in zip(problem.menus, problem.counts, strict=True))
    return Solution(
        counts=chosen, seconds=seconds, bound_s=seconds if proven else fastest, solver=name, solve_s=solve_s
    )


def _solver(gap_fraction: float) -> tuple[str, pulp.LpSolver]:
    """HiGHS, or CBC where HiGHS is missing (or OSDP_SOLVER says so)."""
    wanted = os.environ.get("OSDP_SOLVER", "")
    candidates = {
        "HiGHS": lambda: pulp.HiGHS(msg=False, timeLimit=TIME_LIMIT_S, gapRel=gap_fraction),
        "CBC": lambda: pulp.PULP_CBC_CMD(msg=False, timeLimit=TIME_LIMIT_S, gapRel=gap_fraction),
    }
    if wanted and wanted not in candidates:
        raise SolverError(wanted, "OSDP_SOLVER names it and it is not known", f"Use one of {', '.join(candidates)}")
    for name, make in candidates.items():
        if wanted in ("", name):
            solver = make()
            if solver.available():
                return name, solver
    raise SolverError(wanted or "HiGHS and CBC", "not installed", "pip install highspy")


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
