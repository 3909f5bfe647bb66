"""Traces, compiled: what the step simulator plays for a section, at a micro-batch, with some of its hooks in use.

Between two hooks that matter a section only allocates and frees buffers of its own, so such a run shrinks to two
numbers: how much is live after it, and the highest on the way. A Table keeps what was compiled for one profile.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, Final, Literal

from osdp_ray.costs.splitting import SplitClass, Splits, split_class, split_trace, splits_of
from osdp_ray.costs.units import GRANULE_BYTES, UnitBytes, round_up, unit_bytes
from osdp_ray.records.plan import Unit
from osdp_ray.records.profile import (
    ALLOC,
    FOREIGN,
    FREE,
    GRADIENT,
    HOLD,
    ROOT,
    WORKSPACE,
    Profile,
    Recompute,
    SectionTrace,
)

EVALUATION: Final = "evaluation"  # beside the ways to recompute: a forward without gradients
RUN, BEAR = -1, -2  # codes of compiled steps beside a trace's: a run of bytes, a buffer that is handed on
_KEPT_TABLES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over a section: steps `(code, subject, number, number)`.

    RUN    live += the first number, highest on the way: the second
    BEAR   an own buffer that is handed on: `subject` as a trace numbers it, the first number its bytes
    HOLD, FREE  a holder more, a holder less of an own buffer that is handed on, or a neighbour's (its slot)
    GRADIENT  `subject` is an operator, the first number the bytes of its parameter's gradient, or the second one its
              slot among a neighbour's buffers (tied parameters)
    else   a hook of an operator, the section or the model
    """

    steps: tuple[tuple[int, int, int, int], ...]
    outputs: tuple[int, ...]  # buffers handed on, in order, as a trace numbers them
    left_bytes: int  # own buffers of both passes that nobody frees

    @functools.cached_property
    def late(self) -> int:
        """Where the last steps begin that only let go of neighbours' buffers: what ends a whole backward does so."""
        number = len(self.steps)
        while number and self.steps[number - 1][0] == FREE and self.steps[number - 1][1] < 0:
            number -= 1
        return number


class Table:
    """Everything compiled for one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._passes: dict[tuple[object, ...], Pass] = {}
        self.kept: dict[tuple[object, ...], Any] = {}  # what else is worked out once per profile, by what and of what
        self._units: dict[tuple[int, Unit], UnitBytes] = {}
        self._traces: dict[tuple[int, str], SectionTrace] = {
            **{(trace.class_index, trace.recompute): trace for trace in profile.traces},
            **{(trace.class_index, EVALUATION): trace for trace in profile.evaluation},
        }
        self._alone: dict[tuple[int, str], SectionTrace] = {
            **{(trace.class_index, trace.recompute): trace for trace in profile.alone},
            **{(trace.class_index, EVALUATION): trace for trace in profile.alone_evaluation},
        }
        self._split: dict[tuple[int, Splits], SplitClass] = {}
        self._split_traces: dict[tuple[int, str, Splits, bool], SectionTrace] = {}

    def unit_bytes(self, class_index: int, unit: Unit) -> UnitBytes:
        key = (class_index, unit)
        if key not in self._units:
            splits = splits_of(self.profile.classes[class_index], (unit,))
            self._units[key] = unit_bytes(
                self.split_class(class_index, splits).section_class,
                unit,
                self.profile.ranks_per_node,
                self.profile.precision,
                self.profile.device_kind,
            )
        return self._units[key]

    def split_class(self, class_index: int, splits: Splits) -> SplitClass:
        """A class with its operators or, where they are split, their slices."""
        key = (class_index, splits)
        if key not in self._split:
            self._split[key] = split_class(self.profile.classes[class_index], splits)
        return self._split[key]

    def _trace(self, class_index: int, recompute: str, splits: Splits, micro_batch: int) -> SectionTrace:
        trace = self._traces[class_index, recompute]
        if is_alone := micro_batch == 1 and (class_index, recompute) in self._alone:
            trace = self._alone[class_index, recompute]
        if not splits:
            return trace
        key = (class_index, recompute, splits, is_alone)
        if key not in self._split_traces:
            self._split_traces[key] = split_trace(trace, self.profile.classes[class_index], splits)
        return self._split_traces[key]

    def compiled(
        self,
        class_index: int,
        recompute: Recompute | Literal["evaluation"],
        micro_batch: int,
        hooks: frozenset[int],
        *,
        in_backward: bool,
        splits: Splits = (),
    ) -> Pass:
        """A pass in which only the hooks of the subjects in `hooks` (and the model's, and foreign ones) matter."""
        key = (class_index, recompute, micro_batch, hooks, in_backward, splits)
        if key not in self._passes:
            trace = self._trace(class_index, recompute, splits, micro_batch)
            operator_of = self._operator_of(class_index, splits)
            self._passes[key] = self._compile(trace, operator_of, micro_batch, hooks, in_backward=in_backward)
        return self._passes[key]

    def _operator_of(self, class_index: int, splits: Splits) -> dict[int, int]:
        return self.split_class(class_index, splits).operator_of

    def _compile(
        self,
        trace: SectionTrace,
        operator_of: dict[int, int],
        micro_batch: int,
        hooks: Collection[int],
        *,
        in_backward: bool,
    ) -> Pass:
        rows = {False: self._rows(trace.forward, micro_batch), True: self._rows(trace.backward, micro_batch)}
        sizes = {row[2]: row[3] for row in [*rows[False], *rows[True]] if row[0] == ALLOC}
        handed = {buffer for buffer in (*trace.outputs, *trace.gradient_outputs) if buffer >= 0}
        holders: dict[int, int] = {}
        if in_backward:
            for code, _, buffer, _ in rows[False]:
                holders[buffer] = holders.get(buffer, 0) + _HOLDERS.get(code, 0)
        steps: list[tuple[int, int, int, int]] = []
        net = peak = 0
        for code, subject, buffer, num_bytes in rows[in_backward]:
            if code in _HOLDERS and buffer >= 0 and buffer not in handed:
                holders[buffer] = holders.get(buffer, 0) + _HOLDERS[code]
                if code == ALLOC:
                    net += num_bytes
                    peak = max(peak, net)
                elif holders[buffer] == 0:
                    net -= sizes[buffer]
            elif code == WORKSPACE:
                peak = max(peak, net + num_bytes)
            elif code in _HOLDERS or code == GRADIENT or subject == ROOT or subject >= FOREIGN or subject in hooks:
                if net or peak:
                    steps.append((RUN, 0, net, peak))
                    net = peak = 0
                steps.append(self._special(code, subject, buffer, sizes, operator_of))
        if net or peak:
            steps.append((RUN, 0, net, peak))
        return Pass(
            steps=tuple(steps),
            outputs=trace.gradient_outputs if in_backward else trace.outputs,
            left_bytes=_left(trace, sizes) if in_backward else 0,
        )

    def _rows(self, flat: tuple[int, ...], micro_batch: int) -> list[tuple[int, int, int, int]]:
        """Events as (code, subject, buffer, bytes) at a micro-batch; workspaces are those of a CPU's kernels."""
        kind, scratch = self.profile.device_kind, self.profile.scratch
        granule = GRANULE_BYTES[kind]
        rows = []
        for i in range(0, len(flat), 5):
            code, subject, buffer, constant_bytes, bytes_per_sample = flat[i : i + 5]
            num_bytes = constant_bytes + bytes_per_sample * micro_batch
            if code == WORKSPACE:
                if kind != "cpu":
                    continue
                if subject:
                    num_bytes = scratch[subject - 1].num_bytes(micro_batch) if scratch else 0
            rows.append((code, subject, buffer, round_up(num_bytes, granule)))
        return rows

    def _special(
        self, code: int, subject: int, buffer: int, sizes: dict[int, int], operator_of: dict[int, int]
    ) -> tuple[int, int, int, int]:
        if code == ALLOC:
            return (BEAR, buffer, sizes[buffer], 0)
        if code in _HOLDERS:
            return (code, buffer, 0, 0)
        if code != GRADIENT:
            return (code, subject, 0, 0)
        if subject >= FOREIGN:
            owner, parameter = divmod(subject, FOREIGN)
            operator = FOREIGN * owner + self._operator_of(owner - 1, ())[parameter]
        else:
            operator = operator_of[subject]
        return (GRADIENT, operator, sizes.get(buffer, 0), min(buffer, 0))


def table_of(profile: Profile) -> Table:
    """The table of a profile; the last few profiles' tables are kept."""
    for table in _TABLES:
        if table.profile is profile:
            return table
    table = Table(profile)
    _TABLES.insert(0, table)
    del _TABLES[_KEPT_TABLES:]
    return table


_TABLES: list[Table] = []


_HOLDERS = {ALLOC: 1, HOLD: 1, FREE: -1}


def _left(trace: SectionTrace, sizes: dict[int, int]) -> int:
    """Bytes of own buffers that neither pass frees, hands on or makes a gradient."""
    left = dict.fromkeys(sizes, 0)
    for flat in (trace.forward, trace.backward):
        for i in range(0, len(flat), 5):
            code, buffer = flat[i], flat[i + 2]
            if code in _HOLDERS and buffer >= 0:
                left[buffer] += _HOLDERS[code]
            elif code == GRADIENT and buffer >= 0:
                left[buffer] = -len(flat)
    for buffer in (*trace.outputs, *trace.gradient_outputs):
        if buffer >= 0:
            left[buffer] = 0
    return sum(sizes[buffer] for buffer, holders in left.items() if holders > 0)
