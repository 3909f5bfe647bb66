"""What can be decided for the operators of a section, and the units that follow from it.

    DP      replicated          ZeRO-2, ZeRO-3  sharded over the world, kept gathered from forward to backward or not
    HSDP-2, HSDP                the same, sharded over the ranks of a node, where there are several
    ZeRO-3 hpZ                  sharded over the world, a shard of the node's size kept from forward to backward

Every assignment of choices to operators is considered where those are few. Where they are many, a section mixes at
most two choices, and of operators of the same shape the first ones take the first of the two.

A large operator may also run as 2, 4 or 8 slices, each a unit of its own, as may all large ones of a section together.
Where assignments are many, slices take one choice, or half of them another; the other operators take one.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from osdp_ray.costs import divides, split_class, splittable
from osdp_ray.records.plan import Choice, SectionPlan, Unit, parse_slice, slice_name
from osdp_ray.records.profile import Profile, Recompute, SectionClass

DP = Choice(shard_over="none", regather=True)  # FSDP2 copies replicated parameters; copying again costs no link
ZERO2 = Choice(shard_over="world", regather=False)
ZERO3 = Choice(shard_over="world", regather=True)
HSDP2 = Choice(shard_over="node", regather=False)
HSDP = Choice(shard_over="node", regather=True)
ZERO3_HPZ = Choice(shard_over="world", regather=True, keep_node_shard=True)
CHOICES = (DP, ZERO2, ZERO3)
CHOICES_OF_NODES = (*CHOICES, HSDP2, HSDP, ZERO3_HPZ)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SMALL_FRACTION = 0.05  # operators below this share of their section's parameters follow its largest unit
MAX_WHOLE_PRODUCT = 128
NUM_SLICES = (2, 4, 8)
LARGE_FRACTION = 0.25  # operators above this share of the model's largest section may be split


def choices_of(profile: Profile) -> tuple[Choice, ...]:
    """The choices that a cluster offers: nodes are groups only where there are several of several ranks, all alike.

    A profile knows what their links cost, or they are not offered.
    """
    nodes = profile.ranks_per_node
    are_groups = len(nodes) > 1 and nodes[0] > 1 and len(set(nodes)) == 1
    are_known = {"node", "across"} <= {link.group for link in profile.links}
    return CHOICES_OF_NODES if are_groups and are_known else CHOICES


def group_units(section_class: SectionClass, choices: dict[str, Choice]) -> tuple[Unit, ...]:
    """Operators with equal choices share a unit. In a block the unit with most parameters comes first (its door), and
    what the block owns itself joins it; what the model owns itself is a unit of its own.

    `choices` are by operator; those that it names by their slices are split, and every slice is a unit.
    """
    section_class = with_slices(section_class, choices)
    groups: dict[Choice | str, list[int]] = {}
    for index, operator in enumerate(section_class.operators):
        is_slice = parse_slice(operator.name)[2] > 1
        groups.setdefault(operator.name if is_slice else choices[operator.name], []).append(index)
    ordered = list(groups)
    if section_class.is_block:
        weight = {key: sum(map(section_class.operator_bytes, members)) for key, members in groups.items()}
        ordered.sort(key=lambda key: (isinstance(key, str), 0 if isinstance(key, str) else -weight[key]))
    found = [(groups[key], choices[key] if isinstance(key, str) else key) for key in ordered]
    own = next((index for index, operator in enumerate(section_class.operators) if "" in operator.modules), None)
    if own is not None:  # a module's own parameters are gathered at its door: the block's, or the model's
        choice = choices[section_class.operators[own].name]
        found = [([index for index in members if index != own], other) for members, other in found]
        if section_class.is_block:
            found[0] = (sorted([*found[0][0], own]), found[0][1])
        else:
            found.append(([own], choice))
    return tuple(
        Unit(
            operators=tuple(section_class.operators[index].name for index in members),
            modules=tuple(name for index in members for name in section_class.operators[index].modules),
            choice=choice,
        )
        for members, choice in found
        if members
    )


def with_slices(section_class: SectionClass, names: Iterable[str]) -> SectionClass:
    """The class with slices in the place of the operators that the names split."""
    num_slices = {operator: num for operator, _, num in map(parse_slice, names) if num > 1}
    if not num_slices:
        return section_class
    operators = enumerate(section_class.operators)
    splits = tuple((i, num_slices[operator.name]) for i, operator in operators if operator.name in num_slices)
    return split_class(section_class, splits).section_class


def made_whole(section_class: SectionClass, section: SectionPlan, operators: Iterable[str]) -> SectionPlan | None:
    """The section without slices of these operators; None where the slices of one choose differently."""
    chosen: dict[str, set[Choice]] = {}
    wanted = set(operators)
    for unit in section.units:
        for name in unit.operators:
            operator = parse_slice(name)[0]
            chosen.setdefault(operator if operator in wanted else name, set()).add(unit.choice)
    if any(len(choices) > 1 for choices in chosen.values()):
        return None
    whole = {name: choices.pop() for name, choices in chosen.items()}
    return dataclasses.replace(section, units=group_units(section_class, whole))


def uniform_section(section_class: SectionClass, name: str, choice: Choice, recompute: Recompute) -> SectionPlan:
    """A section in which every operator makes the same choice."""
    units = group_units(section_class, {operator.name: choice for operator in section_class.operators})
    kept = recompute if section_class.is_block else "none"
    return SectionPlan(name=name, is_block=section_class.is_block, recompute=kept, units=units)


def uniform_sections(profile: Profile, choice: Choice, recompute: Recompute) -> tuple[SectionPlan, ...]:
    """A whole model in which every operator makes the same choice."""
    found: dict[int, SectionPlan] = {}
    sections = []
    for section in profile.sections:
        if section.class_index not in found:
            found[section.class_index] = uniform_section(profile.classes[section.class_index], "", choice, recompute)
        sections.append(dataclasses.replace(found[section.class_index], name=section.name))
    return tuple(sections)


def large_operators(profile: Profile, class_index: int) -> tuple[int, ...]:
    """The operators of a class that are worth splitting, of those that can be. A block keeps one whole at its door."""
    largest_bytes = max(section_class.parameter_bytes for section_class in profile.classes)
    section_class = profile.classes[class_index]
    if section_class.is_block and len(section_class.operators) < 2:
        return ()
    found = splittable(profile, class_index)
    return tuple(i for i in found if section_class.operator_bytes(i) >= LARGE_FRACTION * largest_bytes)


def split_assignments(
    section_class: SectionClass, choices: tuple[Choice, ...], large: tuple[int, ...]
) -> list[tuple[Unit, ...]]:
    """The units of every assignment with slices that is considered."""
    found: dict[tuple[Unit, ...], None] = {}
    together = [large] if 1 < len(large) < len(section_class.operators) or not section_class.is_block else []
    for chosen in dict.fromkeys((*((index,) for index in large), *together)):
        for num_slices in NUM_SLICES:
            if not all(divides(section_class, i, num_slices) for i in chosen):
                continue
            operators = [section_class.operators[i].name for i in chosen]
            names = [slice_name(name, j, num_slices) for name in operators for j in range(num_slices)]
            found |= dict.fromkeys(_with_choices(section_class, names, choices))
    return list(found)


def _with_choices(
    section_class: SectionClass, names: list[str], choices: tuple[Choice, ...]
) -> Iterator[tuple[Unit, ...]]:
    cut = with_slices(section_class, names)
    if len(choices) ** len(cut.operators) <= MAX_WHOLE_PRODUCT:
        yield from assignments(cut, choices)
        return
    mixed = ((one, other) for one in choices for other in choices if one.regather and other != one)
    for first, second in itertools.chain(zip(choices, choices, strict=True), mixed):
        for rest in dict.fromkeys((first, second)):
            chosen = {operator.name: rest for operator in cut.operators}
            for name in names:
                _, index, num_slices = parse_slice(name)
                chosen[name] = first if 2 * index < num_slices else second  # what is kept, is kept late
            yield group_units(cut, chosen)


def assignments(section_class: SectionClass, choices: tuple[Choice, ...]) -> list[tuple[Unit, ...]]:
    """The units of every assignment that is considered, uniform ones first, each once."""
    operators = section_class.operators
    total = section_class.parameter_bytes
    large = [i for i in range(len(operators)) if section_class.operator_bytes(i) >= SMALL_FRACTION * total]
    found: dict[tuple[Unit, ...], None] = {}
    for chosen in _combinations(section_class, large, choices):
        weight: dict[Choice, int] = {}
        for index, choice in chosen.items():
            weight[choice] = weight.get(choice, 0) + section_class.operator_bytes(index)
        leading = max(weight, key=lambda choice: weight[choice]) if weight else choices[0]
        whole = {operator.name: chosen.get(index, leading) for index, operator in enumerate(operators)}
        found.setdefault(group_units(section_class, whole))
    return list(found)


def _combinations(
    section_class: SectionClass, large: list[int], choices: tuple[Choice, ...]
) -> Iterator[dict[int, Choice]]:
    for choice in choices:
        yield dict.fromkeys(large, choice)
    if len(choices) ** len(large) <= MAX_WHOLE_PRODUCT:
        for combination in itertools.product(choices, repeat=len(large)):
            yield dict(zip(large, combination, strict=True))
        return
    groups: dict[object, list[int]] = {}
    for index in large:
        shapes = [
            (p.numel, p.itemsize_bytes, p.requires_grad)
            for p in map(section_class.parameters.__getitem__, section_class.operators[index].parameters)
        ]
        groups.setdefault(tuple(shapes), []).append(index)
    for one, other in itertools.combinations(choices, 2):
        for numbers in itertools.product(*(range(len(members) + 1) for members in groups.values())):
            yield {
                index: one if place < number else other
                for number, members in zip(numbers, groups.values(), strict=True)
                for place, index in enumerate(members)
            }
