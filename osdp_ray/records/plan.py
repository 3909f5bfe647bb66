"""Plan: what every operator and block does, and what that is predicted to cost."""

import dataclasses
import itertools
from typing import Literal

from osdp_ray.errors import PlanMismatchError
from osdp_ray.records.overheads import ShardOver
from osdp_ray.records.profile import Precision, Profile, Recompute, Section
from osdp_ray.schema import Record, format_table, record
from osdp_ray.units import MIB, format_bytes, format_percent, format_seconds

Synchronise = Literal["every", "last"]  # which micro-batches of a step reduce their gradients
ScatterGroup = Literal["shared", "own"]  # whether reductions share the gathers' communicator

FLAT_BELOW_BYTES = MIB  # gradients of a replicated unit that are smaller are reduced together, in a buffer of their own


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Choice:
    """How one operator's parameters, gradients and optimizer state are held.

    `shard_over`: replicated ('none'), or sharded over the ranks of a node or of the world. `regather`: free the
    gathered parameters after forward and gather them again in backward, or keep them in between. With
    `keep_node_shard` a rank keeps, in between, its part of what its node shares, and gathers again inside the node.
    """

    shard_over: ShardOver
    regather: bool
    keep_node_shard: bool = False

    @property
    def label(self) -> str:
        """The field's name of the choice: DP, ZeRO-2, ZeRO-3, HSDP; ZeRO++ names the node-sized shard hpZ."""
        if self.keep_node_shard:
            return "ZeRO-3 hpZ"
        names = {"none": ("DP", "DP"), "node": ("HSDP-2", "HSDP"), "world": ("ZeRO-2", "ZeRO-3")}
        return names[self.shard_over][self.regather]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Operators of one section that share a choice and so one collective: one FSDP unit. Names are relative.

    A slice of an operator is an operator of its own: 'mlp.up#0/4' is the first of four (see `slice_name`). `modules`
    are the modules that own their parameters, more than the operators where parameters are tied.
    """

    operators: tuple[str, ...]
    modules: tuple[str, ...]
    choice: Choice


def slice_name(operator: str, index: int, num_slices: int) -> str:
    """The name of slice `index` of `num_slices` of an operator."""
    return f"{operator}#{index}/{num_slices}"


def parse_slice(name: str) -> tuple[str, int, int]:
    """(operator, index, number of slices) of an operator's or a slice's name; a whole one is slice 0 of 1."""
    operator, mark, position = name.rpartition("#")
    if not mark:
        return name, 0, 1
    index, _, num_slices = position.partition("/")
    return operator, int(index), int(num_slices)


def short_names(operators: tuple[str, ...]) -> tuple[str, ...]:
    """Names for people: all slices of an operator as one, 'mlp.up in 4 slices', some of them with their numbers."""
    slices: dict[tuple[str, int], list[int]] = {}
    for name in operators:
        operator, index, num_slices = parse_slice(name)
        slices.setdefault((operator, num_slices), []).append(index)
    names = []
    for (operator, num_slices), indices in slices.items():
        if num_slices == 1:
            names.append(operator)
        elif len(indices) == num_slices:
            names.append(f"{operator} in {num_slices} slices")
        else:
            names.append(f"{operator} slice{'s' * (len(indices) > 1)} {_ranges(indices)} of {num_slices}")
    return tuple(names)


def _ranges(indices: list[int]) -> str:
    """Numbers from 1: '2', '1-3'."""
    first, last = min(indices) + 1, max(indices) + 1
    if last - first + 1 == len(indices):
        return str(first) if first == last else f"{first}-{last}"
    return ", ".join(str(index + 1) for index in sorted(indices))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionPlan:
    """What one section does. In a block the first unit is gathered at its door, the others at their operators."""

    name: str
    is_block: bool
    recompute: Recompute
    units: tuple[Unit, ...]

    @property
    def parameter_modules(self) -> tuple[str, ...]:
        """Full paths of the modules that own this section's parameters."""
        prefix = self.name if self.is_block else ""
        names = (module for unit in self.units for module in unit.modules)
        return tuple(".".join(part for part in (prefix, name) if part) for name in names)

    @property
    def splits(self) -> dict[str, int]:
        """Operators that run as slices, and how many."""
        parsed = (parse_slice(name) for unit in self.units for name in unit.operators if "#" in name)
        return {operator: num_slices for operator, _, num_slices in parsed}

    def units_alike(self) -> tuple[tuple[Choice, tuple[str, ...]], ...]:
        """Units for people: (choice, operators), slices of the same choice together."""
        rows: dict[tuple[Choice, str], list[str]] = {}
        for unit in self.units:
            parsed = {parse_slice(name)[0] if "#" in name else "" for name in unit.operators}
            key = unit.choice, parsed.pop() if len(parsed) == 1 else ""
            rows.setdefault(key, []).extend(unit.operators)
        return tuple((choice, tuple(operators)) for (choice, _), operators in rows.items())

    @property
    def label(self) -> str:
        """A short name of what the section does: 'ZeRO-3', 'DP(mlp.fc) + ZeRO-3', ', recompute'."""
        parts = []
        alike = self.units_alike()
        for choice, operators in sorted(alike, key=lambda row: -len(row[1])):
            num, is_split = len(operators), any("#" in name for name in operators)
            parts.append(choice.label if len(alike) == 1 else f"{choice.label} {num} {'slices' if is_split else 'op'}")
        label = " + ".join(parts) or "-"
        return label if self.recompute == "none" else f"{label}, recompute {self.recompute}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan costs. `peak_by_phase` maps a phase to the highest bytes in it; the largest is `peak_bytes`.

    Phases of memory: building and loading before the first step; forward, loss, backward, optimizer; evaluation.
    Phases of time: forward, backward, communication, optimizer. `held_beside` is what a device holds beside tensors, by
    line: the allocator's reserve, the context, the communicators; with the peak it makes `device_bytes`, which the
    budget bounds.
    """

    peak_bytes: int
    persistent_bytes: int
    peak_by_phase: dict[str, int]
    step_s: float
    step_s_by_phase: dict[str, float]
    samples_per_s: float
    held_beside: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """What the process holds of its device at the peak."""
        return self.peak_bytes + sum(self.held_beside.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
    """A uniform setting at its own best micro-batch, or None where it fits with none."""

    name: str
    micro_batch: int | None
    peak_bytes: int
    step_s: float | None
    samples_per_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolverReport:
    """How the plan was found. `status` is 'optimal' only where that was proven, else 'feasible' with its gap."""

    solver: str
    status: Literal["optimal", "feasible"]
    gap_fraction: float
    num_solves: int
    num_cuts: int


@record("plan", version=2)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Everything the workers need to run a model, and what it is predicted to cost.

    `prefetch`: how many units are gathered ahead in backward, before the one whose backward runs is through.
    `scatter_group`: whether gradients are reduced over the communicator that gathers, or over one of their own.
    `parameter_counts`: elements of every section's parameters, empty in plans of before they were told.
    """

    workload: str
    workload_hash: str
    ranks_per_node: tuple[int, ...]
    precision: Precision
    budget_bytes: int
    global_batch: int
    micro_batch: int
    accumulation: int
    synchronise: Synchronise
    sections: tuple[SectionPlan, ...]
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    solver: SolverReport
    prefetch: int = 1
    scatter_group: ScatterGroup = "shared"
    parameter_counts: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def decisions(self) -> tuple[object, ...]:
        """What the workers would do differently under another plan; equal decisions run the same."""
        return (
            self.precision,
            self.global_batch,
            self.micro_batch,
            self.accumulation,
            self.synchronise,
            self.prefetch,
            self.scatter_group,
            self.sections,
        )

    def require_profile(self, profile: Profile) -> None:
        """Raises PlanMismatchError unless the profile is of the model, the ranks and the precision planned for."""
        for what, planned, found in (
            ("workload", self.workload_hash, profile.workload_hash),
            ("ranks per node", _joined(self.ranks_per_node), _joined(profile.ranks_per_node)),
            ("precision", self.precision, profile.precision),
            ("sections", *_different(self.sections, profile.sections)),
        ):
            if planned != found:
                raise PlanMismatchError(what, planned, found)

    def table(self) -> str:
        """The plan for a terminal: one line per run of equal sections, then the prediction and the alternatives."""
        rows = []
        for _, group in itertools.groupby(self.sections, key=lambda section: (section.recompute, section.units)):
            run = list(group)
            name = run[0].name if len(run) == 1 else f"{run[0].name} .. {run[-1].name}"
            for index, (choice, operators) in enumerate(run[0].units_alike()):
                rows.append(
                    (
                        name if index == 0 else "",
                        str(len(run)) if index == 0 else "",
                        ", ".join(short_names(operators)),
                        choice.shard_over,
                        _between(choice),
                        choice.label,
                        run[0].recompute,
                    )
                )
        header = ("section", "count", "operators", "shard over", "between", "known as", "recompute")
        prediction = self.prediction
        lines = [
            format_table(header, rows),
            "",
            f"{self.num_ranks} ranks x micro-batch {self.micro_batch} x accumulation {self.accumulation} "
            f"= global batch {self.global_batch}; prefetch {self.prefetch}"
            + ("" if self.scatter_group == "shared" else ", reductions on a communicator of their own"),
            f"predicted peak {format_bytes(prediction.peak_bytes)} of {format_bytes(self.budget_bytes)} per device "
            f"({', '.join(f'{phase} {format_bytes(peak)}' for phase, peak in prediction.peak_by_phase.items())})",
            *_beside(prediction),
            f"predicted step {format_seconds(prediction.step_s)} ("
            f"{', '.join(f'{phase} {format_seconds(value)}' for phase, value in prediction.step_s_by_phase.items())}"
            f"), {prediction.samples_per_s:.1f} samples/s",
            f"solver {self.solver.solver}: {self.solver.status}"
            + (f", gap {format_percent(self.solver.gap_fraction)}" if self.solver.status != "optimal" else "")
            + f", {self.solver.num_solves} solves, {self.solver.num_cuts} cuts",
        ]
        if self.alternatives:
            lines += ["", format_table(*_alternatives(self))]
        return "\n".join(lines)


def _between(choice: Choice) -> str:
    if choice.keep_node_shard:
        return "keep the node's"
    return "gather again" if choice.regather else "keep"


def _joined(counts: tuple[int, ...]) -> str:
    return " + ".join(map(str, counts))


def _different(planned: tuple[SectionPlan, ...], found: tuple[Section, ...]) -> tuple[str, str]:
    """Of two rows of sections what tells them apart, twice the same where they are alike."""
    if len(planned) != len(found):
        return f"{len(planned)} in number", f"{len(found)} in number"
    return next(((a.name, b.name) for a, b in zip(planned, found, strict=True) if a.name != b.name), ("", ""))


def _beside(prediction: Prediction) -> list[str]:
    if not prediction.held_beside:
        return []
    lines = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in prediction.held_beside.items())
    return [f"on the device {format_bytes(prediction.device_bytes)}: the peak of tensors, and beside them {lines}"]


def _alternatives(plan: Plan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = [
        (
            "this plan",
            str(plan.micro_batch),
            format_bytes(plan.prediction.peak_bytes),
            f"{plan.prediction.samples_per_s:.1f}",
            "",
        )
    ]
    for other in plan.alternatives:
        if other.samples_per_s is None:
            rows.append((other.name, "-", format_bytes(other.peak_bytes), "does not fit", ""))
        else:
            gain = plan.prediction.samples_per_s / other.samples_per_s - 1
            rows.append(
                (
                    other.name,
                    str(other.micro_batch),
                    format_bytes(other.peak_bytes),
                    f"{other.samples_per_s:.1f}",
                    f"{gain * 100:+.1f} %",
                )
            )
    return ("setting", "micro-batch", "peak", "samples/s", "this plan is"), rows
