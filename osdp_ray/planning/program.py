"""The integer program: which column of a menu how often, in every slot, as fast as the budget allows.

Sets: slots s with num[s] sections, and the columns j of each one's menu that take part; passes p (see menus).

    choose   n[s,j]  in 0..num[s]   how many sections of slot s use column j
    minimize sum n[s,j] * own_s[s,j] + sum exposed[e] * times[e]          see costing
    subject to
      (all_s)        sum_j n[s,j] = num[s]
      (exposed_e_k)  exposed[e] >= row k of e

and, with what is held at the border behind slot s after its forward (kept) and its backward (after),

      kept[p,-1] = fixed + sum n (persistent + base[p])        kept[p,s]  = kept[p,s-1] + sum_j n[s,j] kept[p,s,j]
      after[p,end] = 0                                         after[p,s] = after[p,s+1] + sum_j n[s,j] after[p,s,j]

      (optimizer)    fixed + sum n (persistent + (1 + step_per_total) reduced)                    <= budget
      (forward_p_s)  kept[p,s-1] + sum_j n[s,j] forward[p,s,j]                                    <= budget
      (backward_p_s) kept[p,s] + after[p,s+1] + sum_j n[s,j] backward[p,s,j]                      <= budget

The last two are of slots of one section; a long slot has the least that its first and last section can need instead:

      (forward_p_s)  kept[p,s] + min_j (forward - kept)                                           <= budget
      (backward_p_s) kept[p,s] + after[p,s+1] + min_j backward                                    <= budget
      (first_p_s)    kept[p,s-1] + after[p,s] + min_j (kept - after + backward)                   <= budget

Every row is exact or too low for any plan, in any order. What stretches of long slots and neighbours add is put in by
`cuts.py` once a solution is found to break the budget. Bytes and seconds are scaled so that the budget and the step
are about 1000; plans are checked outside the solver.
"""

import dataclasses
from collections.abc import Sequence

import pulp

from osdp_ray.planning.costing import Columns, Objective
from osdp_ray.planning.layout import Layout
from osdp_ray.planning.menus import Floats
from osdp_ray.planning.solvers import run_solver

_SCALE = 1000.0
_EXCESS_COST = 1e4
_SIMPLER_FRACTION = 2e-8  # of the step's seconds, all sections together: preference for few units and few bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solution:
    """How often each column of each slot is used. `value` is the objective (seconds or bytes), `bound` what no other
    choice of these columns goes below."""

    counts: tuple[dict[int, int], ...]
    value: float
    bound: float
    solver: str


class Program:
    """One program over `columns` (by slot). Without a budget it looks for the lowest peak, not the fastest step."""

    def __init__(
        self,
        layout: Layout,
        columns: Sequence[Sequence[int]],
        objective: Objective,
        *,
        budget_bytes: int | None,
        scale_bytes: float,
        scale_s: float,
        is_relaxed: bool,
    ) -> None:
        self.layout, self.columns, self.objective = layout, [list(chosen) for chosen in columns], objective
        self.is_relaxed, self.scale_s, self.per_byte = is_relaxed, scale_s, _SCALE / scale_bytes
        self.order_free = True
        self.model = pulp.LpProblem("plan", pulp.LpMinimize)
        self.n: list[dict[int, pulp.LpVariable]] = []
        self.flags: dict[tuple[str, int, int], pulp.LpVariable] = {}
        self.names: set[str] = set()
        self._rows: list[tuple[pulp.LpConstraint, Columns]] = []
        self._all: list[pulp.LpConstraint] = []
        self._add_counts()
        self.limit = self.model.add_variable("budget", 0)
        self.limit_value = budget_bytes * self.per_byte if budget_bytes is not None else 0.0
        if budget_bytes is not None and not is_relaxed:
            self.lower_budget(budget_bytes)
        self._add_levels()
        self.for_speed = budget_bytes is not None
        self._add_objective()

    # -- building

    def _add_counts(self) -> None:
        for slot, chosen in enumerate(self.columns):
            num = self.layout.slots[slot].num
            category = "Continuous" if self.is_relaxed else "Integer"
            self.n.append(
                {column: self.model.add_variable(f"n_{slot}_{column}", 0, num, cat=category) for column in chosen}
            )
            self._all.append(pulp.lpSum(self.n[slot].values()) == num)
            self.model += self._all[-1], f"all_{slot}"

    def add_row(
        self,
        name: str,
        terms: list[tuple[pulp.LpVariable, float]],
        columns: Columns,
        sense: int,
        right: float,
    ) -> None:
        """Adds `sum of terms + sum of n * columns (sense) right`."""
        pairs = list(terms)
        for slot, values in columns.items():
            pairs += [(n, float(values[column])) for column, n in self.n[slot].items() if values[column]]
        row = pulp.LpConstraint(pulp.LpAffineExpression(pairs), sense, name, right)
        self.model += row
        self.names.add(name)
        self._rows.append((row, columns))

    def add_limit(self, name: str, terms: list[tuple[pulp.LpVariable, float]], columns: Columns, more: float) -> None:
        """Adds `terms + columns + more <= budget`; `more` and the columns' figures are scaled already."""
        self.add_row(name, [*terms, (self.limit, -1.0)], columns, pulp.LpConstraintLE, -more)

    def figures(self, slot: int, number: int, name: str) -> Floats:
        """Scaled bytes of every column of a slot in a pass; exact for those that take part, unless it is relaxed."""
        menu = self.layout.menu(slot)
        values: Floats = getattr(menu, name)[number] * self.per_byte
        if not self.is_relaxed:
            for column in self.columns[slot]:
                values[column] = getattr(menu.measured(column)[number], name) * self.per_byte
        return values

    def _add_levels(self) -> None:
        layout, num_slots = self.layout, len(self.layout.slots)
        per_byte, fixed = self.per_byte, self.layout.fixed_bytes * self.per_byte
        factor = 1 + layout.profile.optimizer.step_bytes_per_total
        held = {
            slot: (layout.menu(slot).persistent + factor * layout.menu(slot).reduced) * per_byte
            for slot in range(num_slots)
        }
        self.add_limit("optimizer", [], held, fixed)
        self.kept: list[list[pulp.LpVariable]] = []  # [pass][slot + 1]
        self.after: list[list[pulp.LpVariable | None]] = []  # [pass][slot], None behind the last
        for number in range(layout.shape.num_passes):
            self._add_pass(number, fixed)

    def _add_pass(self, number: int, fixed: float) -> None:
        layout, num_slots = self.layout, len(self.layout.slots)
        equal = pulp.LpConstraintEQ
        base = self.model.add_variable(f"kept_{number}_base")
        held = {
            slot: -(layout.menu(slot).persistent * self.per_byte + self.figures(slot, number, "base"))
            for slot in range(num_slots)
        }
        self.add_row(f"base_{number}", [(base, 1.0)], held, equal, fixed)
        kept: list[pulp.LpVariable] = [base]
        for slot in range(num_slots):
            kept.append(self.model.add_variable(f"kept_{number}_{slot}"))
            terms = [(kept[-1], 1.0), (kept[-2], -1.0)]
            self.add_row(f"kept_{number}_{slot}", terms, {slot: -self.figures(slot, number, "kept")}, equal, 0.0)
        after: list[pulp.LpVariable | None] = [None] * (num_slots + 1)
        for slot in range(num_slots - 1, -1, -1):
            after[slot] = self.model.add_variable(f"after_{number}_{slot}")
            terms = [(after[slot], 1.0), *self.plus(after[slot + 1], -1.0)]
            self.add_row(f"after_{number}_{slot}", terms, {slot: -self.figures(slot, number, "after")}, equal, 0.0)
        self.kept.append(kept)
        self.after.append(after)
        for slot in range(num_slots):
            self._add_peaks(number, slot)

    def _add_peaks(self, number: int, slot: int) -> None:
        kept, after = self.kept[number], self.after[number]
        forward, backward = (self.figures(slot, number, name) for name in ("forward", "backward"))
        before, behind = [(kept[slot], 1.0)], [(kept[slot + 1], 1.0)]
        if self.layout.slots[slot].num == 1:
            self.add_limit(f"forward_{number}_{slot}", before, {slot: forward}, 0.0)
            terms = [*behind, *self.plus(after[slot + 1])]
            self.add_limit(f"backward_{number}_{slot}", terms, {slot: backward}, 0.0)
            return
        chosen = self.columns[slot] if not self.is_relaxed else slice(None)
        keeps, leaves = (self.figures(slot, number, name) for name in ("kept", "after"))
        self.add_limit(f"forward_{number}_{slot}", behind, {}, float((forward - keeps)[chosen].min()))
        terms = [*behind, *self.plus(after[slot + 1])]
        self.add_limit(f"backward_{number}_{slot}", terms, {}, float(backward[chosen].min()))
        first = float((keeps - leaves + backward)[chosen].min())
        self.add_limit(f"first_{number}_{slot}", [*before, *self.plus(after[slot])], {}, first)

    @staticmethod
    def plus(variable: pulp.LpVariable | None, factor: float = 1.0) -> list[tuple[pulp.LpVariable, float]]:
        return [] if variable is None else [(variable, factor)]

    def _add_objective(self) -> None:
        """Seconds, with a tiny preference for few units; or the budget, with a tiny preference for fast plans."""
        self._cost: list[Floats] = []
        per_s = _SCALE / self.scale_s
        num_sections = len(self.layout.profile.sections)
        for slot, own in enumerate(self.objective.own):
            menu = self.layout.menu(slot)
            simpler = menu.num_units / max(1.0, menu.num_units.max())
            lean = menu.persistent / max(1.0, menu.persistent.max())
            tiny = _SIMPLER_FRACTION * _SCALE / num_sections * (simpler + lean)
            self._cost.append((own * per_s + tiny) if self.for_speed else own * per_s * 1e-9)
        pairs = [(n, float(self._cost[slot][j])) for slot, chosen in enumerate(self.n) for j, n in chosen.items()]
        if self.for_speed:
            for exposure in self.objective.exposures:
                exposed = self.model.add_variable(exposure.name, 0)
                pairs.append((exposed, exposure.times * per_s))
                for k, (columns, constant) in enumerate(exposure.rows):
                    negated = {slot: -values for slot, values in columns.items()}
                    name = f"exposed_{exposure.name}_{k}"
                    self.add_row(name, [(exposed, 1.0)], negated, pulp.LpConstraintGE, constant)
        if not self.for_speed:
            pairs.append((self.limit, 1.0))
        elif self.is_relaxed:  # what is above the budget costs so much that it is used only where nothing fits
            excess = self.model.add_variable("excess", 0)
            self.model += self.limit - excess <= self.limit_value, "excess_row"
            pairs.append((excess, _EXCESS_COST))
            self.excess_variable = excess
        self.taken = pulp.LpAffineExpression(pairs)
        self.model.setObjective(self.taken)

    def lower_budget(self, budget_bytes: int) -> None:
        """Another budget for the rows that are there and those to come."""
        self.limit.upBound = budget_bytes * self.per_byte

    def faster_than(self, limit_s: float) -> None:
        """Only solutions that take at most so long."""
        self.model += self.taken <= (limit_s - self.objective.constant_s) * _SCALE / self.scale_s, "limit"

    def flag(self, kind: str, slot: int, column: int) -> pulp.LpVariable:
        """Whether a column is used in a long slot: 'used' at least once, 'many' twice, 'three' three times."""
        key = (kind, slot, column)
        if key not in self.flags:
            n, num = self.n[slot][column], self.layout.slots[slot].num
            flag = self.model.add_variable(f"{kind}_{slot}_{column}", cat="Binary")
            least = {"used": 1, "many": 2, "three": 3}[kind]
            self.model += n <= (least - 1) + (num - least + 1) * flag, f"{kind}_{slot}_{column}_on"
            self.model += n >= least * flag, f"{kind}_{slot}_{column}_off"
            self.flags[key] = flag
        return self.flags[key]

    # -- solving

    def solve(self, *, gap_fraction: float = 0.0, max_nodes: int = 5000) -> Solution | None:
        """The best counts, or None where none fit. Raises SolverError."""
        outcome = run_solver(self.model, is_integer=not self.is_relaxed, gap_fraction=gap_fraction, max_nodes=max_nodes)
        if outcome is None:
            return None
        value, bound = outcome.value, outcome.bound
        is_found = value < float("inf")
        factor, more = self.scale_s / _SCALE, self.objective.constant_s
        if not self.for_speed:
            factor, more = 1 / self.per_byte, 0.0
        counts = tuple(
            {column: round(n.value() or 0) for column, n in chosen.items() if is_found and round(n.value() or 0)}
            for chosen in self.n
        )
        return Solution(counts=counts, value=value * factor + more, bound=bound * factor + more, solver=outcome.solver)

    def excess(self) -> float:
        """Of a relaxed program: how much of the budget its solution lacks, as a fraction of the scale."""
        return float(self.excess_variable.value() or 0.0) / _SCALE if self.for_speed else 0.0

    def prices(self) -> list[Floats]:
        """Reduced costs of every column of every slot by the relaxed program's duals, in seconds (or bytes)."""
        reduced = [cost.copy() for cost in self._cost]
        for row, columns in self._rows:
            dual = row.pi
            if dual:
                for slot, values in columns.items():
                    reduced[slot] -= dual * values
        for slot in range(len(reduced)):
            reduced[slot] -= self._all[slot].pi
        return reduced

    def support(self) -> tuple[tuple[int, ...], ...]:
        """The columns that a solved program uses, by slot."""
        return tuple(tuple(column for column, n in chosen.items() if (n.value() or 0.0) > 1e-9) for chosen in self.n)
