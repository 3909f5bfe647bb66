"""Other ways to choose what every operator does, on costs that add up: the peers of `benchmarks/planner.py`.

A task is a row of groups of equal operators; an operator takes one of a few ways, each with seconds and bytes; the
seconds' sum is minimised while the bytes' sum keeps a capacity. Overlap, lifetimes and recomputation are left out,
which none of the peers knows. Every solver returns the seconds of its choice, or None where it found none in its
limits. All of them run on one core, so what they take is counted in seconds of CPU, which other work does not change.
"""

import dataclasses
import os
import time
from collections.abc import Callable

import numpy as np
import pulp

from osdp_ray.planning.choices import CHOICES
from osdp_ray.planning.menus import Menu, StepShape
from osdp_ray.planning.solvers import run_solver
from osdp_ray.records.profile import Profile
from osdp_ray.units import MIB

_MAX_NODES_OF_SEARCH = 1_000_000
_LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Way:
    seconds: float
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Group:
    """`num` operators that are alike, and their ways."""

    num: int
    ways: tuple[Way, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    groups: tuple[Group, ...]
    capacity_bytes: int


def task_of(profile: Profile, micro_batch: int, fraction: float) -> Task:
    """Every operator's ways (DP, ZeRO-2, ZeRO-3) by the profile's costs, at a fraction between leanest and fattest."""
    shape = StepShape(micro_batch=micro_batch, accumulation=1)
    groups = []
    for class_index, section_class in enumerate(profile.classes):
        num = sum(section.class_index == class_index for section in profile.sections)
        menu = Menu(profile, class_index, shape)
        whole = [_way(menu, column) for column in menu.uniform_columns()[: len(CHOICES)]]
        total = section_class.parameter_bytes or 1
        for index in range(len(section_class.operators)):
            share = section_class.operator_bytes(index) / total
            ways = tuple(Way(way.seconds * share, round(way.num_bytes * share)) for way in whole)
            groups.append(Group(num, ways))
    least = sum(group.num * min(way.num_bytes for way in group.ways) for group in groups)
    most = sum(group.num * max(way.num_bytes for way in group.ways) for group in groups)
    return Task(tuple(groups), least + round(fraction * (most - least)))


def _way(menu: Menu, column: int) -> Way:
    seconds = sum(float(values[column]) for values in menu.seconds.values())
    return Way(seconds, int(menu.persistent[column] + menu.reduced[column] + menu.kept[0][column]))


def counts(task: Task) -> float | None:
    """Our form: how many operators of a group take each way."""
    return _program(task, [(group.num, group.ways) for group in task.groups], "Integer")


def per_operator(task: Task) -> float | None:
    """A binary per operator and way."""
    return _program(task, [(1, group.ways) for group in task.groups for _ in range(group.num)], "Binary")


def wrap_or_not(task: Task) -> float | None:
    """A binary per operator: sharded as ZeRO-3 or not at all."""
    return _program(task, [(1, (g.ways[0], g.ways[-1])) for g in task.groups for _ in range(g.num)], "Binary")


def _program(task: Task, rows: list[tuple[int, tuple[Way, ...]]], category: str) -> float | None:
    model = pulp.LpProblem("peer", pulp.LpMinimize)
    chosen = []
    for index, (num, ways) in enumerate(rows):
        variables = [model.add_variable(f"n_{index}_{w}", 0, num, cat=category) for w in range(len(ways))]
        model += pulp.lpSum(variables) == num
        chosen += list(zip(variables, ways, strict=True))
    scale = 1000 / max(sum(num * max(way.seconds for way in ways) for num, ways in rows), 1e-12)
    model += pulp.lpSum(n * (way.num_bytes / MIB) for n, way in chosen) <= task.capacity_bytes / MIB
    model.setObjective(pulp.lpSum(n * (way.seconds * scale) for n, way in chosen))
    if run_solver(model, is_integer=True, gap_fraction=1e-5, max_nodes=20000) is None:
        return None
    return sum(way.seconds * round(n.value() or 0) for n, way in chosen)


def depth_first(task: Task) -> float | None:
    """Operator by operator, fastest way first; a branch is left where its bytes or its seconds cannot do."""
    rows = [sorted(group.ways, key=lambda way: way.seconds) for group in task.groups for _ in range(group.num)]
    lean = np.cumsum([0, *(min(way.num_bytes for way in ways) for ways in reversed(rows))])[::-1]
    fast = np.cumsum([0.0, *(ways[0].seconds for ways in reversed(rows))])[::-1]
    best, nodes = float("inf"), 0
    stack = [(0, 0.0, 0)]
    while stack and nodes < _MAX_NODES_OF_SEARCH:
        depth, seconds, num_bytes = stack.pop()
        nodes += 1
        if num_bytes + lean[depth] > task.capacity_bytes or seconds + fast[depth] >= best:
            continue
        if depth == len(rows):
            best = seconds
            continue
        stack += [(depth + 1, seconds + way.seconds, num_bytes + way.num_bytes) for way in reversed(rows[depth])]
    return best if best < float("inf") else None


def dynamic_program(task: Task) -> float | None:
    """Operator by operator over whole megabytes (cut off, not rounded up, as in OSDP's released code)."""
    capacity = task.capacity_bytes // MIB
    least = np.zeros(capacity + 1)
    started = cpu_s()
    for group in task.groups:
        for _ in range(group.num):
            if cpu_s() - started > _LIMIT_S:
                return None
            after = np.full(capacity + 1, np.inf)
            for way in group.ways:
                size = way.num_bytes // MIB
                if size <= capacity:
                    after[size:] = np.minimum(after[size:], least[: capacity + 1 - size] + way.seconds)
            least = after
    return float(least[-1]) if np.isfinite(least[-1]) else None


PEERS: dict[str, Callable[[Task], float | None]] = {
    "counts (ours)": counts,
    "binary per operator": per_operator,
    "wrap or not": wrap_or_not,
    "depth-first search": depth_first,
    "dynamic program over MB": dynamic_program,
}


def timed(solve: Callable[[Task], float | None], task: Task) -> tuple[float, float | None]:
    """(seconds of CPU that it took, seconds of its choice)."""
    started = cpu_s()
    found = solve(task)
    return cpu_s() - started, found


def cpu_s() -> float:
    """Seconds of CPU of this process and of those that it waited for."""
    return time.process_time() + sum(os.times()[2:4])
