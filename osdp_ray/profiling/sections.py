"""Events of a whole run -> traces of sections.

The forward of a block reaches from its entry to the next block's, its backward from the gradient of its output to that
of the block before it; the stem is what comes before the first block, the head what comes after the last one, with the
loss. Frees that directly follow a block's end belong to it. Buffers that cross a border get slots (see SectionTrace).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from osdp_ray.errors import TraceError
from osdp_ray.modeling.structure import Structure
from osdp_ray.profiling.recorder import BACKWARD, Event
from osdp_ray.profiling.scratch import Kernels
from osdp_ray.records.profile import (
    ALLOC,
    ENTER,
    EXIT,
    FOREIGN,
    FREE,
    GRADIENT,
    HOLD,
    POST_BACKWARD,
    PRE_BACKWARD,
    ROOT,
    SECTION,
    WORKSPACE,
    Recompute,
    SectionTrace,
)

_Rows = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Events of one forward and backward, the same at every micro-batch, and their sizes (constant, per sample).

    `recomputes` says which blocks recompute what; the others do not.
    """

    recomputes: Mapping[str, Recompute]
    events: list[Event]
    sizes: list[tuple[int, int]]


def join_runs(
    recomputes: Mapping[str, Recompute],
    runs: list[list[Event]],
    micro_batches: tuple[int, ...],
    kernels: Kernels,
    *,
    is_sampled: bool,
) -> Run:
    """One Run of two that differ in the micro-batch alone. Raises TraceError where they differ in more than sizes.

    Runs that are `is_sampled` may differ, as values decide. A size that is not linear in the micro-batch is then the
    most per sample that was seen; where they do other operations, the larger run stands for all. What is to be measured
    of operations gets its number in `kernels`.
    """
    small, large = runs
    if is_sampled and _operations(small) != _operations(large):
        events, sizes = _numbered(large, large, kernels), _sizes_of_one(large, micro_batches[1])
    else:
        events, sizes = _numbered(small, large, kernels), _affine_sizes(runs, micro_batches, is_sampled)
    return Run(recomputes=recomputes, events=events, sizes=sizes)


def _numbered(small: list[Event], large: list[Event], kernels: Kernels) -> list[Event]:
    """The first of two runs, with the numbers of kernels in the place of their calls."""
    return [
        dataclasses.replace(event, subject=kernels.number(event.subject, other.subject))
        if event.code == WORKSPACE and event.subject is not None
        else event
        for event, other in zip(small, large, strict=False)
    ]


def cut_sections(structure: Structure, run: Run) -> list[SectionTrace]:
    """One SectionTrace per class and way to recompute that ran; see `representatives`."""
    cutter = _Cutter(structure, run, _present(structure, run))
    return [cutter.cut(name, index, recompute) for (index, recompute), name in representatives(structure, run).items()]


def representatives(structure: Structure, run: Run) -> dict[tuple[int, Recompute], str]:
    """(class, recompute) -> the section that stands for it: the second that ran, between its equals, if any."""
    members: dict[tuple[int, Recompute], list[str]] = {}
    present = set(_present(structure, run))
    for section in structure.sections:
        if section.name in present:
            key = section.class_index, run.recomputes.get(section.name, "none")
            members.setdefault(key, []).append(section.name)
    return {key: names[min(1, len(names) - 1)] for key, names in members.items()}


def without_unreached(structure: Structure, traces: Iterable[SectionTrace]) -> Structure:
    """The structure in which parameters that got no gradient in any trace require none: nothing is kept for them."""
    reached = set()
    for trace in traces:
        for rows in (trace.forward, trace.backward):
            for i in range(0, len(rows), 5):
                if rows[i] == GRADIENT:
                    owner, index = divmod(rows[i + 1], FOREIGN)
                    reached.add((owner - 1 if owner else trace.class_index, index))
    classes = tuple(
        dataclasses.replace(
            section_class,
            parameters=tuple(
                dataclasses.replace(parameter, requires_grad=(class_index, index) in reached)
                for index, parameter in enumerate(section_class.parameters)
            ),
        )
        for class_index, section_class in enumerate(structure.classes)
    )
    return dataclasses.replace(structure, classes=classes)


def section_spans(structure: Structure, run: Run) -> dict[str, tuple[range, range]]:
    """Which events are of the forward and of the backward of each section that ran."""
    return _spans(run.events, _present(structure, run))


def find_variants(structure: Structure, runs: list[Run], stands_for: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Block -> number of its variant: blocks of one structure that allocate differently because of their neighbours.

    `stands_for` maps each block to look at to itself and the blocks that are like it.
    """
    found: dict[str, list[object]] = {}
    class_of = {section.name: section.class_index for section in structure.sections}
    for run in runs:
        present = _present(structure, run)
        cutter = _Cutter(structure, run, present)
        for name in stands_for:
            recompute = run.recomputes.get(name, "none")
            found.setdefault(name, []).append(_essence(cutter.cut(name, class_of[name], recompute)))
    numbers: dict[object, int] = {}
    variants: dict[str, int] = {}
    for name, traces in found.items():
        number = numbers.setdefault((class_of[name], *traces), len(numbers))
        variants |= dict.fromkeys(stands_for[name], number)
    return variants


def _essence(trace: SectionTrace) -> object:
    """What makes a variant: all of a trace but where its backward frees what earlier sections left behind."""
    backward = trace.backward
    kept = tuple(
        backward[i : i + 5]
        for i in range(0, len(backward), 5)
        if not (backward[i] == FREE and backward[i + 2] < 0 and backward[i + 2] % 2)
    )
    return (trace.forward, kept, trace.outputs, trace.gradient_outputs)


def _present(structure: Structure, run: Run) -> list[str]:
    ran = {event.subject for event in run.events if event.code == ENTER}
    return [section.name for section in structure.sections if section.name in ran or section.name in ("stem", "head")]


def _affine_sizes(runs: list[list[Event]], micro_batches: tuple[int, ...], is_sampled: bool) -> list[tuple[int, int]]:
    """(constant, per sample) of each event's size. Raises TraceError where the runs differ in more than sizes."""
    small, large = runs
    if _operations(small) != _operations(large):
        raise TraceError(
            "",
            f"it does other operations at micro-batch {micro_batches[0]} than at {micro_batches[1]}",
            "Avoid branches that depend on the batch's size, or use --measure",
        )
    sizes = []
    for first, second in zip(small, large, strict=True):
        per_sample, rest = divmod(second.num_bytes - first.num_bytes, micro_batches[1] - micro_batches[0])
        constant = first.num_bytes - per_sample * micro_batches[0]
        if is_sampled and (rest or constant < 0):
            each = max(-(-event.num_bytes // size) for event, size in zip((first, second), micro_batches, strict=True))
            sizes.append((0, each))
            continue
        if rest:
            raise TraceError(
                "", "a tensor's size is not linear in the micro-batch", "Keep every size linear in it, or use --measure"
            )
        sizes.append((constant, per_sample))
    return sizes


def _operations(events: list[Event]) -> list[tuple[int, int, object]]:
    return [(event.code, event.buffer, None if event.code == WORKSPACE else event.subject) for event in events]


def _sizes_of_one(events: list[Event], micro_batch: int) -> list[tuple[int, int]]:
    """Sizes of a run alone: those of gradients and those that do not divide by the micro-batch are constant."""
    gradients = {event.buffer for event in events if event.code == GRADIENT}
    return [
        (event.num_bytes, 0)
        if event.buffer in gradients or event.num_bytes % micro_batch
        else (0, event.num_bytes // micro_batch)
        for event in events
    ]


def _spans(events: list[Event], present: list[str]) -> dict[str, tuple[range, range]]:
    """Index ranges of each present section's forward and backward events."""
    blocks = present[1:-1]
    turn = next(index for index, event in enumerate(events) if event.code == BACKWARD)
    first = _first_index(events)
    enters = [first[(ENTER, name)] for name in blocks]
    forward_ends = [*enters[1:], _past_releases(events, _last(events, EXIT, blocks[-1], turn) + 1)] if blocks else []
    pre = [first.get((PRE_BACKWARD, name), len(events)) for name in blocks]
    starts = [enters[0] if blocks else turn, *forward_ends]
    head_forward = range(forward_ends[-1] if blocks else turn, turn)
    spans = {"stem": (range(starts[0]), range(len(events), len(events)))}
    for index, name in enumerate(blocks):
        if index > 0:
            end = pre[index - 1]
        else:
            post = first.get((POST_BACKWARD, name))
            end = _past_releases(events, post + 1) if post is not None else len(events)
            spans["stem"] = (spans["stem"][0], range(end, len(events)))
        spans[name] = (range(enters[index], forward_ends[index]), range(pre[index], end))
    spans["head"] = (head_forward, range(turn + 1, pre[-1] if blocks else len(events)))
    return spans


def _first_index(events: list[Event]) -> dict[tuple[int, str], int]:
    first: dict[tuple[int, str], int] = {}
    for index, event in enumerate(events):
        first.setdefault((event.code, event.subject), index)
    return first


def _last(events: list[Event], code: int, subject: str, end: int) -> int:
    return max(index for index in range(end) if events[index].code == code and events[index].subject == subject)


def _past_releases(events: list[Event], index: int) -> int:
    while index < len(events) and events[index].code in (FREE, HOLD):
        index += 1
    return index


class _Cutter:
    """Turns a section's span of events into rows with local numbers."""

    def __init__(self, structure: Structure, run: Run, present: list[str]) -> None:
        events = self.events = run.events
        self.sizes, self.present = run.sizes, present
        spans = self.spans = _spans(events, present)
        self.born: dict[int, tuple[int, bool]] = {}  # buffer -> (section, in backward)
        self.reach: dict[int, tuple[int, int]] = {}  # buffer -> (first, last) of the sections that touch it
        self.rank: dict[tuple[int, int], int] = {}  # (section, buffer) -> where it stands among what the section holds
        for position, name in enumerate(present):
            for in_backward, span in zip((False, True), spans[name], strict=True):
                for index in span:
                    event = events[index]
                    if event.code == ALLOC:
                        self.born[event.buffer] = (position, in_backward)
                    if event.code in (ALLOC, HOLD, FREE, GRADIENT):  # a tied parameter's may be of a later section
                        first, last = self.reach.get(event.buffer, (position, position))
                        self.reach[event.buffer] = min(first, position), max(last, position)
                    if event.code == HOLD:
                        self.rank.setdefault((position, event.buffer), len(self.rank))
        self.subjects = _subjects(structure, present)
        self.parameters = _parameter_subjects(structure, present)

    def cut(self, name: str, class_index: int, recompute: Recompute) -> SectionTrace:
        position = self.present.index(name)
        forward, backward = self.spans[name]
        own = [
            self.events[index].buffer
            for span in (forward, backward)
            for index in span
            if self.events[index].code == ALLOC
        ]
        slots = {buffer: -(2 * slot + 1) for slot, buffer in enumerate(self._after_forward(position - 1))}
        slots |= {buffer: -(2 * slot + 2) for slot, buffer in enumerate(self._after_backward(position + 1))}
        slots |= {buffer: number for number, buffer in enumerate(own)}
        return SectionTrace(
            class_index=class_index,
            recompute=recompute,
            forward=self._rows(forward, slots, class_index),
            backward=self._rows(backward, slots, class_index),
            outputs=tuple(slots[buffer] for buffer in self._after_forward(position)),
            gradient_outputs=tuple(slots[buffer] for buffer in self._after_backward(position)),
        )

    def _after_forward(self, position: int) -> list[int]:
        """Buffers of this or an earlier section's forward that a later section touches.

        First this section's own, those that a block gives in its order, then what it was given, in that order; of the
        stem those first that the first block takes. So neighbours agree on slots whatever they recompute, and whatever
        comes before and after a row of them.
        """
        if position < 0:
            return []
        taker = position if position else 1
        own = [
            buffer for buffer, (section, in_backward) in self.born.items() if section == position and not in_backward
        ]
        own.sort(key=lambda buffer: self.rank.get((taker, buffer), len(self.rank)))
        return [buffer for buffer in (*own, *self._after_forward(position - 1)) if self.reach[buffer][1] > position]

    def _after_backward(self, position: int) -> list[int]:
        """Buffers of this or a later section's backward that an earlier section touches.

        First those that the next section but one hands on, each in the order of birth.
        """
        handed = [
            buffer
            for buffer, (section, in_backward) in self.born.items()
            if in_backward and section >= position and self.reach[buffer][0] < position
        ]
        return sorted(handed, key=lambda buffer: self.reach[buffer][0] == position - 1)

    def _rows(self, span: range, slots: dict[int, int], class_index: int) -> tuple[int, ...]:
        rows: list[int] = []
        for index in span:
            event = self.events[index]
            constant, per_sample = self.sizes[index]
            if event.code in (ALLOC, FREE, HOLD):
                if event.buffer in slots:
                    rows += (event.code, 0, slots[event.buffer], constant, per_sample)
            elif event.code == WORKSPACE:
                rows += (event.code, event.subject or 0, 0, constant, per_sample)
            elif event.code == GRADIENT:
                if event.buffer in slots:
                    subject = _relative(self.parameters[event.subject], class_index)
                    rows += (event.code, subject, slots[event.buffer], 0, 0)
            else:
                for found in self.subjects.get(event.subject, ()):
                    rows += (event.code, _relative(found, class_index), 0, 0, 0)
        return tuple(rows)


def _relative(subject: tuple[int, int], class_index: int) -> int:
    """(class, index) as seen from a class: the index itself, or a FOREIGN number."""
    owner, index = subject
    return index if owner == class_index or index < 0 else FOREIGN * (owner + 1) + index


def _subjects(structure: Structure, present: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Module path -> what its hooks stand for: (class, SECTION), (class, operator), or the ROOT."""
    subjects: dict[str, list[tuple[int, int]]] = {"": [(-1, ROOT)]}
    for section in structure.sections:
        if section.name not in present:
            continue
        section_class = structure.classes[section.class_index]
        prefix = section.name if section_class.is_block else ""
        if section_class.is_block:
            subjects.setdefault(section.name, []).append((section.class_index, SECTION))
        for index, operator in enumerate(section_class.operators):
            for module in operator.modules:
                path = ".".join(part for part in (prefix, module) if part)
                subjects.setdefault(path, []).append((section.class_index, index))
    return subjects


def _parameter_subjects(structure: Structure, present: list[str]) -> dict[str, tuple[int, int]]:
    subjects = {}
    for section in structure.sections:
        if section.name in present:
            section_class = structure.classes[section.class_index]
            prefix = f"{section.name}." if section_class.is_block else ""
            for index, parameter in enumerate(section_class.parameters):
                subjects[f"{prefix}{parameter.name}"] = (section.class_index, index)
    return subjects


def of_one_sample(trace: SectionTrace) -> SectionTrace:
    """The same trace with the sizes of one sample as constants."""

    def fixed(row: tuple[int, ...]) -> tuple[int, ...]:
        events = zip(*[iter(row)] * 5, strict=True)
        return tuple(x for code, subject, buffer, c, per in events for x in (code, subject, buffer, c + per, 0))

    return dataclasses.replace(trace, forward=fixed(trace.forward), backward=fixed(trace.backward))


def first_of_each(found: list[Any]) -> Iterator[Any]:
    """Of what was found of sections in several runs, the first of each class and way to recompute, in order."""
    seen = {(item.class_index, item.recompute): item for item in reversed(found)}
    for _, item in sorted(seen.items()):
        yield item
