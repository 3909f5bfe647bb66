"""What can be decided for the operators of a section, and the units that follow from it.

    DP      replicated          ZeRO-2, ZeRO-3  sharded over the world, kept gathered from forward to backward or not
    HSDP-2, HSDP                the same, sharded over the ranks of a node, where there are several

Every assignment of choices to operators is considered where those are few. Where they are many, a section mixes at
most two choices, and of operators of the same shape the first ones take the first of the two.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from osdp_ray.records.plan import Choice, SectionPlan, Unit
from osdp_ray.records.profile import Profile, Recompute, SectionClass

DP = Choice(shard_over="none", regather=True)  # FSDP2 copies replicated parameters; copying again costs no link
ZERO2 = Choice(shard_over="world", regather=False)
ZERO3 = Choice(shard_over="world", regather=True)
HSDP2 = Choice(shard_over="node", regather=False)
HSDP = Choice(shard_over="node", regather=True)
CHOICES = (DP, ZERO2, ZERO3)
CHOICES_OF_NODES = (*CHOICES, HSDP2, HSDP)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SMALL_FRACTION = 0.05  # operators below this share of their section's parameters follow its largest unit
MAX_WHOLE_PRODUCT = 128


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
    what the block owns itself joins it; what the model owns itself is a unit of its own."""
    groups: dict[Choice, list[int]] = {}
    for index, operator in enumerate(section_class.operators):
        groups.setdefault(choices[operator.name], []).append(index)
    if section_class.is_block:
        weight = {choice: sum(map(section_class.operator_bytes, members)) for choice, members in groups.items()}
        ordered = sorted(groups, key=lambda choice: -weight[choice])
    else:
        ordered = list(groups)
    found = [(groups[choice], choice) for choice in ordered]
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
