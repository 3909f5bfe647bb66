"""The integer program: which recipe how often, for one micro-batch, as fast as the budget allows.

Sets: section classes c with num[c] sections, and for each its menu of recipes r. Stretches g = (c, r) are in canonical
order along the model: classes by first appearance, recipes by Recipe.order.

    choose   n[g]    in 0..num[c]   how many sections of class c use recipe r
             used[g] in {0, 1}      whether any does
             many[g] in {0, 1}      whether two or more do
    minimize sum n[g] * seconds[g]
    subject to
      (all_c)       sum over g of c of n[g] = num[c]
      (used_g)      used[g] <= n[g] <= num[c] * used[g]
      (many_g)      n[g] <= used[g] + (num[c] - 1) * many[g]

and, with the levels after the forward and before the backward of stretch g,

      kept[g]  = fixed + sum_h n[h] persistent[h] + sum_{h<=g} n[h] kept[h]
      level[g] = kept[g] + sum_{h>g} n[h] gradient[h]

      (forward_g)   kept[g] + used[g] (forward[g] - kept bytes[g])                                <= budget
      (first_g)     level[g] + used[g] backward[g]                                                <= budget
      (last_g)      level[g-1] + used[g] (kept bytes[g] - gradient[g] + backward[g])              <= budget
      (inner ...)   the same three with many[g] and the figures between equal neighbours          <= budget
      (optimizer)   fixed + sum_h n[h] (persistent[h] + (1 + step_per_total) gradient[h])         <= budget

`first` and `last` are the first and last section of a stretch in backward: within a stretch the levels are linear, so
the peak is at one of its ends. Where a stretch is empty its rows state a level that is passed in any case, so no big
constants are needed. Every row is exact or too low. What a border between two different stretches adds is put in by
cuts, once a plan of the program is found to break the budget: with p = bytes[cut] - bytes[g] of the direction,

      (cut: g next to h)   row of g + p * (used[g] + used[h] - 1 - sum of used between them)      <= budget

Bytes are in MiB for the solver; plans are checked by the simulator outside it.
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
_LEAN_S_PER_MIB = 1e-9  # preference for lean plans among equals

Stretch = tuple[int, int]  # class, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """The highest bytes above its level of a section of `stretch` whose neighbour in that pass is of `neighbour`."""

    in_backward: bool
    stretch: Stretch
    neighbour: Stretch
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One program: menus and section counts by class, the bytes that are there in any case, and cuts."""

    menus: tuple[tuple[Recipe, ...], ...]
    counts: tuple[int, ...]
    fixed_bytes: int
    step_bytes_per_gradient: float
    cuts: tuple[Cut, ...] = ()


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
    program = _Program(problem, budget_bytes / MIB)
    taken = pulp.lpSum(recipe.seconds * n for recipe, n in program.counted())
    if limit_s is not None:
        program.model += taken <= limit_s, "limit"
    lean = pulp.lpSum((_LEAN_S_PER_MIB * recipe.persistent_bytes / MIB) * n for recipe, n in program.counted())
    program.model.setObjective(taken + lean)
    return _run(program, gap_fraction=0.0)


def leanest(problem: Problem) -> Solution:
    """The counts with the lowest peak, whatever they take: the program with the budget as its objective."""
    program = _Program(problem, None)
    program.model.setObjective(program.limit)
    solution = _run(program, gap_fraction=LEANEST_GAP_FRACTION)
    if solution is None:
        raise SolverError("HiGHS", "it found no plan at all for an unlimited budget", "Please report this profile")
    return solution


class _Program:
    """The program's variables and rows; see the module's docstring for their names."""

    def __init__(self, problem: Problem, limit_mib: float | None) -> None:
        self.problem = problem
        self.model = pulp.LpProblem("plan", pulp.LpMinimize)
        self.stretches: list[Stretch] = [(c, r) for c, menu in enumerate(problem.menus) for r in range(len(menu))]
        self.n: dict[Stretch, pulp.LpVariable] = {}
        self.used: dict[Stretch, pulp.LpVariable] = {}
        self.many: dict[Stretch, pulp.LpVariable] = {}
        self.limit = self.model.add_variable("budget", 0) if limit_mib is None else limit_mib
        self._add_counts()
        self._add_levels()
        self._add_used_sums()
        for index, stretch in enumerate(self.stretches):
            self._add_rows(index, stretch)
        for number, cut in enumerate(problem.cuts):
            self._add_cut(number, cut)

    def counted(self) -> Iterator[tuple[Recipe, pulp.LpVariable]]:
        for c, r in self.stretches:
            yield self.problem.menus[c][r], self.n[c, r]

    def _add_counts(self) -> None:
        for c, (menu, num) in enumerate(zip(self.problem.menus, self.problem.counts, strict=True)):
            for r in range(len(menu)):
                n = self.n[c, r] = self.model.add_variable(f"n_{c}_{r}", 0, num, cat="Integer")
                if num == 1:
                    self.used[c, r] = n
                    continue
                used = self.used[c, r] = self.model.add_variable(f"used_{c}_{r}", cat="Binary")
                many = self.many[c, r] = self.model.add_variable(f"many_{c}_{r}", cat="Binary")
                self.model += n <= num * used, f"used_{c}_{r}_row"
                self.model += used <= n, f"unused_{c}_{r}_row"  # else an empty stretch could part two neighbours
                self.model += n <= used + (num - 1) * many, f"many_{c}_{r}_row"
            self.model += pulp.lpSum(self.n[c, r] for r in range(len(menu))) == num, f"all_{c}"

    def _add_levels(self) -> None:
        """Running sums are variables of their own, so that every row has a handful of entries."""
        persistent = self.model.add_variable("persistent", 0)
        gradients = self.model.add_variable("gradients")
        self.model += (
            persistent
            == self.problem.fixed_bytes / MIB
            + pulp.lpSum((recipe.persistent_bytes / MIB) * n for recipe, n in self.counted()),
            "persistent_sum",
        )
        self.model += (
            gradients == pulp.lpSum((recipe.gradient_bytes / MIB) * n for recipe, n in self.counted()),
            "gradients_sum",
        )
        factor = 1 + self.problem.step_bytes_per_gradient
        self.model += persistent + factor * gradients <= self.limit, "optimizer"
        self.kept: list[pulp.LpVariable] = [persistent]
        self.level: list[pulp.LpVariable] = [self.model.add_variable("level_0")]
        self.model += self.level[0] == persistent + gradients, "level_0_row"
        for index, (recipe, n) in enumerate(self.counted(), 1):
            kept = self.model.add_variable(f"kept_{index}")
            level = self.model.add_variable(f"level_{index}")
            kept_mib, gradient_mib = recipe.kept_bytes / MIB, recipe.gradient_bytes / MIB
            self.model += kept == self.kept[-1] + kept_mib * n, f"kept_{index}_row"
            self.model += level == self.level[-1] + (kept_mib - gradient_mib) * n, f"level_{index}_row"
            self.kept.append(kept)
            self.level.append(level)

    def _add_used_sums(self) -> None:
        """How many stretches are used up to each one, so that those between two are a difference of two variables."""
        self.used_sum: list[pulp.LpVariable | int] = [0]
        if not self.problem.cuts:
            return
        for index, stretch in enumerate(self.stretches, 1):
            total = self.model.add_variable(f"used_sum_{index}", 0)
            self.model += total == self.used_sum[-1] + self.used[stretch], f"used_sum_{index}_row"
            self.used_sum.append(total)

    def _add_rows(self, index: int, stretch: Stretch) -> None:
        c, r = stretch
        recipe, used = self.problem.menus[c][r], self.used[stretch]
        kept, gradient = recipe.kept_bytes / MIB, recipe.gradient_bytes / MIB
        forward, backward = recipe.forward_bytes / MIB, recipe.backward_bytes / MIB
        before, after = self.level[index], self.level[index + 1]
        self.model += self.kept[index + 1] + used * (forward - kept) <= self.limit, f"forward_{c}_{r}"
        self.model += after + used * backward <= self.limit, f"first_{c}_{r}"
        if self.problem.counts[c] == 1:
            return
        self.model += before + used * (kept - gradient + backward) <= self.limit, f"last_{c}_{r}"
        many = self.many[stretch]
        forward, backward = recipe.inner_forward_bytes / MIB, recipe.inner_backward_bytes / MIB
        self.model += self.kept[index + 1] + many * (forward - kept) <= self.limit, f"inner_forward_{c}_{r}"
        self.model += after + many * (gradient - kept + backward) <= self.limit, f"inner_first_{c}_{r}"
        self.model += before + many * (kept - gradient + backward) <= self.limit, f"inner_last_{c}_{r}"

    def _add_cut(self, number: int, cut: Cut) -> None:
        """The row of a border: in forward `neighbour` runs before `stretch`, in backward too, so it lies behind it."""
        index, other = self.stretches.index(cut.stretch), self.stretches.index(cut.neighbour)
        between = self.used_sum[max(index, other)] - self.used_sum[min(index, other) + 1]
        meets = self.used[cut.stretch] + self.used[cut.neighbour] - 1 - between
        recipe = self.problem.menus[cut.stretch[0]][cut.stretch[1]]
        own_bytes = recipe.backward_bytes if cut.in_backward else recipe.forward_bytes
        level = self.level[index + 1] if cut.in_backward else self.kept[index]
        row = level + self.used[cut.stretch] * (own_bytes / MIB) + meets * ((cut.num_bytes - own_bytes) / MIB)
        self.model += row <= self.limit, f"cut_{number}"


def _run(program: _Program, *, gap_fraction: float) -> Solution | None:
    name, solver = _solver(gap_fraction)
    model, problem = program.model, program.problem
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
    chosen = tuple(
        tuple(round(program.n[c, r].value() or 0) for r in range(len(menu))) for c, menu in enumerate(problem.menus)
    )
    seconds = sum(problem.menus[c][r].seconds * number for c, row in enumerate(chosen) for r, number in enumerate(row))
    # A solve that ran out of time proves nothing but that every section takes at least its fastest recipe.
    fastest = sum(min(r.seconds for r in menu) * n for menu, n in zip(problem.menus, problem.counts, strict=True))
    proven = model.sol_status == pulp.LpSolutionOptimal
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
