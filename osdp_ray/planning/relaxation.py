"""A bound for a step shape, and which columns can matter: the program's linear relaxation over whole menus.

Menus have hundreds of columns and a solution uses a handful, so columns are generated: solve over a few, price all
others by the duals, take in those that would help, until none would (Gilmore and Gomory, Operations Research 9(6),
1961). The value is then a bound for every plan in every order, and by the reduced costs r at the end

    a plan that uses column j anywhere takes at least  bound + r[j]

so columns with bound + r[j] above a plan that is known cannot be in a faster one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from osdp_ray.planning.costing import objective
from osdp_ray.planning.layout import Layout
from osdp_ray.planning.menus import Floats
from osdp_ray.planning.program import Program

_MAX_ROUNDS = 60
_NEW_PER_ROUND = 3
_MAX_REFERENCES = 6  # of a slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation:
    """`bound` in seconds of a step (or bytes of the leanest plan); `reduced` costs by slot and column, likewise.

    `used` are the columns of the relaxed solution, by slot.
    """

    bound: float
    reduced: tuple[Floats, ...]
    used: tuple[tuple[int, ...], ...]

    def nearest(self, most: Sequence[int], room: float) -> tuple[list[list[int]], float]:
        """By slot the columns of reduced cost up to `room`, at most so many; the least reduced cost of the others."""
        chosen, left_out = [], float("inf")
        for reduced, number in zip(self.reduced, most, strict=True):
            order = np.argsort(reduced, kind="stable")
            taken = [int(column) for column in order[:number] if reduced[column] <= room] or [int(order[0])]
            chosen.append(taken)
            if len(taken) < len(order):
                left_out = min(left_out, float(reduced[order[len(taken)]]))
        return chosen, left_out


def relax(
    layout: Layout, *, budget_bytes: int | None, scale_bytes: float, scale_s: float, is_bound: bool = True
) -> Relaxation | None:
    """The relaxation over whole menus, or None where nothing fits the budget even so.

    With `is_bound` false it is one of the estimate, whose reduced costs say which columns promise most.
    """
    references: dict[int, list[int]] = {}
    goal = objective(layout, is_bound=is_bound)
    columns = [layout.menu(slot).uniform_columns() for slot in range(len(layout.slots))]
    solution = None
    for _ in range(_MAX_ROUNDS):
        program = Program(
            layout,
            columns,
            goal,
            budget_bytes=budget_bytes,
            scale_bytes=scale_bytes,
            scale_s=scale_s,
            is_relaxed=True,
        )
        solution = program.solve()
        if solution is None:
            return None
        reduced = program.prices()
        new = [_most_wanted(values, chosen) for values, chosen in zip(reduced, columns, strict=True)]
        if not any(new):
            known = {slot: list(chosen) for slot, chosen in references.items()}
            _refer_to(layout, program, references)
            if not is_bound or references == known:
                break
            goal = objective(layout, is_bound=True, references=references)
        columns = [chosen + more for chosen, more in zip(columns, new, strict=True)]
    if solution is None or program.excess() > 1e-9:
        return None
    factor = (scale_s if budget_bytes is not None else scale_bytes) / 1000.0
    return Relaxation(
        bound=solution.bound,
        reduced=tuple(np.maximum(values, 0.0) * factor for values in reduced),
        used=program.support(),
    )


def _refer_to(layout: Layout, program: Program, references: dict[int, list[int]]) -> None:
    """Adds the columns that a solution uses in long slots, as far as there is room; see costing."""
    for slot, used in enumerate(program.support()):
        if layout.slots[slot].num > 1 and layout.profile.overlaps:
            known = references.setdefault(slot, [])
            known += [column for column in used if column not in known][: _MAX_REFERENCES - len(known)]


def _most_wanted(reduced: Floats, chosen: Sequence[int]) -> list[int]:
    order = np.argsort(reduced, kind="stable")[: _NEW_PER_ROUND + len(chosen)]
    known = set(chosen)
    return [int(j) for j in order if reduced[j] < -1e-7 and int(j) not in known][:_NEW_PER_ROUND]
