"""Operators as slices: what splitting makes of a section's class and of its trace. Nothing is traced again.

Slices lie along the weight's second dimension and share the operator's output and the gradient of its input (see
`modeling.splitting`), so a trace changes in hooks and in gradients of weights alone. With slices 0 .. k-1:

    forward   ENTER 0, output, EXIT 0                         then ENTER i, EXIT i for every other slice
    backward  PRE k-1, what is recomputed, gradient of the input, gradient of weight k-1, POST k-1
              then PRE i, gradient of weight i, POST i, down to slice 0, which frees what the operator frees

What a kernel holds while it runs (WORKSPACE) stands for what each slice's kernel holds, a smaller one of the same kind.
Embedding copies the columns of its output's gradient that are a slice's. Slice 0 keeps the operator's number as a
subject of hooks, and its parameters' numbers; the others are numbered behind all of the class.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from osdp_ray.records.plan import Unit, parse_slice, slice_name
from osdp_ray.records.profile import (
    ALLOC,
    ENTER,
    EXIT,
    FOREIGN,
    FREE,
    GRADIENT,
    POST_BACKWARD,
    PRE_BACKWARD,
    WORKSPACE,
    Operator,
    Parameter,
    Profile,
    SectionClass,
    SectionTrace,
)

Splits = tuple[tuple[int, int], ...]  # (operator of the class, number of slices), by operator
_Event = tuple[int, int, int, int, int]
_COPYING = "Embedding"  # the kind whose slices copy their columns of the output's gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitClass:
    """A class with slices in the place of operators. `subjects` are the numbers of operators in traces, by name;
    `operator_of` maps a parameter's number in them to its operator's."""

    section_class: SectionClass
    subjects: dict[str, int]
    operator_of: dict[int, int]


def splits_of(section_class: SectionClass, units: Iterable[Unit]) -> Splits:
    """Which operators of a class the units hold as slices."""
    parsed = [parse_slice(name) for unit in units for name in unit.operators]
    slices = {operator: num for operator, _, num in parsed if num > 1}
    if not slices:
        return ()
    return tuple((i, slices[o.name]) for i, o in enumerate(section_class.operators) if o.name in slices)


def split_class(section_class: SectionClass, splits: Splits) -> SplitClass:
    """The class with every slice an operator of its own, in the order in which modules come."""
    chosen = dict(splits)
    operators: list[Operator] = []
    parameters = list(section_class.parameters)
    subjects: dict[str, int] = {}
    operator_of: dict[int, int] = {}
    num_operators = len(section_class.operators)
    for index, operator in enumerate(section_class.operators):
        weight = weight_of(section_class, index) if index in chosen else None
        if weight is None:
            operators.append(operator)
            subjects[operator.name] = index
            operator_of |= dict.fromkeys(operator.parameters, index)
            continue
        pieces = _pieces(section_class.parameters[weight], operator.name, chosen[index])
        for number, piece in enumerate(pieces):
            numbers: tuple[int, ...] = (len(parameters),)
            if number == 0:
                numbers, parameters[weight] = operator.parameters, piece
            else:
                parameters.append(piece)
            name = slice_name(operator.name, number, len(pieces))
            subjects[name] = index
            if number:
                subjects[name] = num_operators + len(parameters) - len(section_class.parameters) - 1
            operator_of |= dict.fromkeys(numbers, subjects[name])
            operators.append(
                Operator(
                    name=name,
                    kind=operator.kind,
                    modules=(f"{operator.name}.slices.{number}",),
                    parameters=numbers,
                    buffer_bytes=0,
                    can_split=False,
                )
            )
    whole = dataclasses.replace(section_class, operators=tuple(operators), parameters=tuple(parameters))
    return SplitClass(section_class=whole, subjects=subjects, operator_of=operator_of)


def _pieces(weight: Parameter, operator: str, num_slices: int) -> list[Parameter]:
    shape = (weight.shape[0], weight.shape[1] // num_slices)
    key = weight.name.rpartition(".")[2]
    return [dataclasses.replace(weight, name=f"{operator}.slices.{i}.{key}", shape=shape) for i in range(num_slices)]


def weight_of(section_class: SectionClass, operator: int) -> int | None:
    """The parameter of an operator that slices are cut from; None where there is none."""
    found = [i for i in section_class.operators[operator].parameters if len(section_class.parameters[i].shape) == 2]
    return found[0] if len(found) == 1 else None


def divides(section_class: SectionClass, operator: int, num_slices: int) -> bool:
    """Whether an operator's weight can be cut into so many slices of the same size."""
    weight = weight_of(section_class, operator)
    return weight is not None and section_class.parameters[weight].shape[1] % num_slices == 0


def splittable(profile: Profile, class_index: int) -> tuple[int, ...]:
    """The operators of a class that can run as slices: of a kind that has them, alone in owning their parameters, run
    once, and with nothing in their traces that slices would do otherwise."""
    section_class = profile.classes[class_index]
    traces = [t for t in (*profile.traces, *profile.evaluation) if t.class_index == class_index]
    others = [t for t in (*profile.traces, *profile.evaluation) if t.class_index != class_index]
    foreign = {subject for trace in others for subject in _subjects(trace)}
    return tuple(
        index
        for index, operator in enumerate(section_class.operators)
        if operator.can_split
        and len(operator.modules) == 1
        and weight_of(section_class, index) is not None
        and FOREIGN * (class_index + 1) + index not in foreign
        and all(_is_plain(trace, section_class, index) for trace in traces)
    )


def _subjects(trace: SectionTrace) -> set[int]:
    hooks = (ENTER, EXIT, PRE_BACKWARD, POST_BACKWARD)
    return {code_row[1] for row in (trace.forward, trace.backward) for code_row in _events(row) if code_row[0] in hooks}


def _is_plain(trace: SectionTrace, section_class: SectionClass, operator: int) -> bool:
    """Whether the operator runs once and its backward allocates one gradient each, no more."""
    forward, backward = _events(trace.forward), _events(trace.backward)
    enters = [event for event in forward if event[:2] == (ENTER, operator)]
    if len(enters) != 1:
        return False
    region = _region(backward, operator, weight_of(section_class, operator))
    if region is None:
        return True
    kinds = _allocations(backward, region, weight_of(section_class, operator))
    return len(kinds.weight) <= 1 and len(kinds.bias) <= 1 and len(kinds.inputs) <= 1


def split_trace(trace: SectionTrace, section_class: SectionClass, splits: Splits) -> SectionTrace:
    """The trace of a section whose operators run as slices."""
    chosen = split_class(section_class, splits)
    forward, backward = _events(trace.forward), _events(trace.backward)
    next_buffer = 1 + max((event[2] for event in (*forward, *backward) if event[0] == ALLOC), default=-1)
    for operator, num_slices in splits:
        name = section_class.operators[operator].name
        subjects = [chosen.subjects[slice_name(name, i, num_slices)] for i in range(num_slices)]
        weights = [next(p for p, owner in chosen.operator_of.items() if owner == s) for s in subjects[1:]]
        cut = _Cut(section_class, operator, subjects, weights, next_buffer)
        out = cut.output_bytes(forward)
        forward = cut.runs(forward)
        backward = cut.backward(cut.runs(backward), out)
        if trace.recompute == "selective" and section_class.operators[operator].kind != _COPYING:
            backward = [event for event in backward if not (event[0] in (ENTER, EXIT) and event[1] in subjects)]
        next_buffer = cut.next_buffer
    return dataclasses.replace(
        trace, forward=tuple(n for event in forward for n in event), backward=tuple(n for e in backward for n in e)
    )


@dataclasses.dataclass
class _Cut:
    """Rewrites events for one operator: `subjects` of its slices, `weights` of all but the first."""

    section_class: SectionClass
    operator: int
    subjects: list[int]
    weights: list[int]
    next_buffer: int

    def output_bytes(self, forward: list[_Event]) -> tuple[int, int]:
        """(constant, per sample) of the operator's output."""
        is_inside, found = False, (0, 0)
        for code, subject, _, constant, per_sample in forward:
            if subject == self.operator and code in (ENTER, EXIT):
                is_inside = code == ENTER
            elif is_inside and code == ALLOC:
                found = constant, per_sample
        return found

    def runs(self, events: list[_Event]) -> list[_Event]:
        """The other slices run after the first."""
        written: list[_Event] = []
        inside: list[_Event] = []
        for event in events:
            written.append(event)
            if event[:2] == (ENTER, self.operator):
                inside = []
            elif event[0] == WORKSPACE:
                inside.append(event)
            elif event[:2] == (EXIT, self.operator):
                for subject in self.subjects[1:]:
                    written += [_hook(ENTER, subject), *inside, _hook(EXIT, subject)]
        return written

    def backward(self, events: list[_Event], output_bytes: tuple[int, int]) -> list[_Event]:
        weight = weight_of(self.section_class, self.operator)
        region = _region(events, self.operator, weight)
        if region is None:
            return events
        first, end = region
        kinds = _allocations(events, region, weight)
        new = {*kinds.weight, *kinds.bias, *kinds.inputs}
        inputs, weights = (_workspaces(events, indices) for indices in (kinds.inputs, kinds.weight))
        moved = {*new, *inputs, *weights}
        of_inputs, of_weights = [events[i] for i in inputs], [events[i] for i in weights]
        start = min(new, default=first + 1)
        ordered = [self.subjects[-1 - i] for i in range(len(self.subjects))]
        written = [*events[:first], _hook(PRE_BACKWARD, ordered[0]), *events[first + 1 : start]]
        written += [events[i] for i in kinds.inputs]
        for number, subject in enumerate(ordered):
            if number:
                written.append(_hook(PRE_BACKWARD, subject))
            written += of_inputs
            is_first_slice = subject == self.operator
            if kinds.weight:
                whole = [events[kinds.weight[0]], *of_weights]
                written += self._gradient(whole, output_bytes, number, is_first_slice)
            if not is_first_slice:
                written.append(_hook(POST_BACKWARD, subject))
        written += [events[i] for i in kinds.bias]
        done = _hook(POST_BACKWARD, self.operator)
        rest = [events[i] for i in range(start, end) if i not in moved and events[i] != done]
        return [*written, *rest, done, *events[end:]]

    def _gradient(
        self, made: list[_Event], output_bytes: tuple[int, int], number: int, is_first_slice: bool
    ) -> list[_Event]:
        """A slice's gradient, where it is copied what it is made from. `made` is how the whole one comes about."""
        num_slices, (whole, *workspaces) = len(self.subjects), made
        buffer = whole[2]
        if not is_first_slice:
            buffer, self.next_buffer = self.next_buffer, self.next_buffer + 1
        events: list[_Event] = [(ALLOC, 0, buffer, whole[3] // num_slices, whole[4] // num_slices), *workspaces]
        if self.section_class.operators[self.operator].kind == _COPYING:
            copy, self.next_buffer = self.next_buffer, self.next_buffer + 1
            constant, per_sample = (size // num_slices for size in output_bytes)
            events = [(ALLOC, 0, copy, constant, per_sample), *events, (FREE, 0, copy, 0, 0)]
        if not is_first_slice:
            events.append((GRADIENT, self.weights[num_slices - 2 - number], buffer, 0, 0))
        return events


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Allocations:
    """Indices of the events that allocate gradients in an operator's backward, by what they are the gradients of."""

    weight: tuple[int, ...]
    bias: tuple[int, ...]
    inputs: tuple[int, ...]


def _allocations(events: list[_Event], region: tuple[int, int], weight: int | None) -> _Allocations:
    first, end = region
    gradients = {event[2]: event[1] for event in events if event[0] == GRADIENT and event[1] < FOREIGN}
    start = _recomputed_until(events, first, end)
    found: dict[str, list[int]] = {"weight": [], "bias": [], "inputs": []}
    for index in range(start, end):
        code, _, buffer, _, _ = events[index]
        if code == ALLOC:
            owner = gradients.get(buffer)
            kind = "inputs" if owner is None else "weight" if owner == weight else "bias"
            found[kind].append(index)
    return _Allocations(**{kind: tuple(indices) for kind, indices in found.items()})


def _workspaces(events: list[_Event], allocations: tuple[int, ...]) -> list[int]:
    """Indices of what the kernels held that made these allocations; it stands right behind them."""
    found = []
    for index in allocations:
        following = itertools.takewhile(lambda i: events[i][0] == WORKSPACE, range(index + 1, len(events)))
        found += list(following)
    return found


def _recomputed_until(events: list[_Event], first: int, end: int) -> int:
    """Past the last hook of a forward that is repeated within an operator's backward."""
    last = max((i for i in range(first, end) if events[i][0] in (ENTER, EXIT)), default=first)
    return last + 1


def _region(events: list[_Event], operator: int, weight: int | None) -> tuple[int, int] | None:
    """(first, end): from the hook before an operator's backward to the one after it, or to its weight's gradient."""
    starts = [i for i, event in enumerate(events) if event[:2] == (PRE_BACKWARD, operator)]
    if not starts:
        return None
    first = starts[0]
    for i in range(first, len(events)):
        if events[i][:2] == (POST_BACKWARD, operator):
            return first, i + 1
    ends = [i for i in range(first, len(events)) if events[i][:2] == (GRADIENT, weight)]
    return (first, ends[-1] + 1) if ends else (first, first + 1)


def _events(row: Sequence[int]) -> list[_Event]:
    return [(row[i], row[i + 1], row[i + 2], row[i + 3], row[i + 4]) for i in range(0, len(row), 5)]


def _hook(code: int, subject: int) -> _Event:
    return (code, subject, 0, 0, 0)
