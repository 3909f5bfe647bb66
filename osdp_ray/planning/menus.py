"""The menu: every way to run a section of a class, with its bytes by lifetime and its seconds, dominated ones dropped.

A recipe is one choice per operator and one way to recompute. Its bytes are read off the step simulator: the middle of
three blocks of the same recipe for a block, the section itself for stem and head.
"""

import dataclasses
import itertools

from osdp_ray.costs import StepSimulator, section_seconds, table_of
from osdp_ray.records.plan import Choice, SectionPlan, Unit
from osdp_ray.records.profile import Profile, Recompute, SectionClass

DP = Choice(shard_over="none", regather=True)  # FSDP2 copies replicated parameters; copying again costs no link
ZERO2 = Choice(shard_over="world", regather=False)
ZERO3 = Choice(shard_over="world", regather=True)
CHOICES = (DP, ZERO2, ZERO3)
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
_SMALL_FRACTION = 0.05  # operators below this share of their section's parameters follow its first unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to run the sections of a class.

    persistent_bytes   held between steps
    kept_bytes         from its forward to its backward
    gradient_bytes     from its backward to the optimizer's step
    forward_bytes      highest in its forward, above the level before it
    backward_bytes     highest in its backward, above the level before it (its own kept bytes are below that level)
    lone_forward_bytes, lone_backward_bytes  the same without neighbours, whose buffers only add to them
    """

    units: tuple[Unit, ...]
    recompute: Recompute
    seconds: float
    persistent_bytes: int
    kept_bytes: int
    gradient_bytes: int
    forward_bytes: int
    backward_bytes: int
    lone_forward_bytes: int
    lone_backward_bytes: int

    def without_neighbours(self) -> "Recipe":
        """The same recipe as a lower bound: no buffer of a neighbour overlaps with its own."""
        return dataclasses.replace(self, forward_bytes=self.lone_forward_bytes, backward_bytes=self.lone_backward_bytes)

    def section(self, name: str, *, is_block: bool) -> SectionPlan:
        return SectionPlan(name=name, is_block=is_block, recompute=self.recompute, units=self.units)

    @property
    def order(self) -> tuple[object, ...]:
        """Canonical order along the model: recomputed blocks first, those that keep most last."""
        choices = tuple((unit.choice.shard_over, unit.choice.regather, unit.operators) for unit in self.units)
        return (self.recompute == "none", self.kept_bytes, self.persistent_bytes, choices)


def group_units(section_class: SectionClass, choices: dict[str, Choice]) -> tuple[Unit, ...]:
    """Operators with equal choices share a unit. In a block the unit with most parameters comes first (its door)."""
    groups: dict[Choice, list[int]] = {}
    for index, operator in enumerate(section_class.operators):
        groups.setdefault(choices[operator.name], []).append(index)
    if section_class.is_block:
        weight = {choice: sum(map(section_class.operator_bytes, members)) for choice, members in groups.items()}
        ordered = sorted(groups, key=lambda choice: -weight[choice])
    else:
        ordered = list(groups)
    return tuple(
        Unit(
            operators=tuple(section_class.operators[index].name for index in groups[choice]),
            modules=tuple(name for index in groups[choice] for name in section_class.operators[index].modules),
            choice=choice,
        )
        for choice in ordered
    )


def uniform_section(section_class: SectionClass, name: str, choice: Choice, recompute: Recompute) -> SectionPlan:
    """A section in which every operator makes the same choice."""
    units = group_units(section_class, {operator.name: choice for operator in section_class.operators})
    kept = recompute if section_class.is_block else "none"
    return SectionPlan(name=name, is_block=section_class.is_block, recompute=kept, units=units)


def uniform_sections(profile: Profile, choice: Choice, recompute: Recompute) -> tuple[SectionPlan, ...]:
    """A whole model in which every operator makes the same choice."""
    return tuple(
        uniform_section(profile.classes[section.class_index], section.name, choice, recompute)
        for section in profile.sections
    )


def build_menu(profile: Profile, class_index: int, *, micro_batch: int, accumulation: int) -> tuple[Recipe, ...]:
    """All recipes of a class at a micro-batch that no other one beats or equals in every figure."""
    section_class = profile.classes[class_index]
    recomputes = RECOMPUTES if section_class.is_block else RECOMPUTES[:1]
    recipes = []
    for units in _unit_choices(section_class):
        for recompute in recomputes:
            section = SectionPlan(name="", is_block=section_class.is_block, recompute=recompute, units=units)
            recipes.append(_measure(profile, class_index, section, micro_batch, accumulation))
    return _undominated(recipes)


def _unit_choices(section_class: SectionClass) -> list[tuple[Unit, ...]]:
    """Every assignment of choices to the large operators; the small ones follow the first unit's choice."""
    total = section_class.parameter_bytes
    operators = section_class.operators
    large = [i for i in range(len(operators)) if section_class.operator_bytes(i) >= _SMALL_FRACTION * total]
    assignments = []
    for combination in itertools.product(CHOICES, repeat=len(large)):
        choices = {operators[index].name: choice for index, choice in zip(large, combination, strict=True)}
        weight: dict[Choice, int] = {}
        for index, choice in zip(large, combination, strict=True):
            weight[choice] = weight.get(choice, 0) + section_class.operator_bytes(index)
        leading = max(weight, key=lambda choice: weight[choice]) if weight else CHOICES[0]
        whole = {operator.name: choices.get(operator.name, leading) for operator in operators}
        assignments.append(group_units(section_class, whole))
    return assignments


def _measure(profile: Profile, class_index: int, section: SectionPlan, micro_batch: int, accumulation: int) -> Recipe:
    seconds = section_seconds(profile, class_index, section, micro_batch).step_s(accumulation)
    sizes = [table_of(profile).unit_bytes(class_index, unit) for unit in section.units]
    optimizer = profile.optimizer
    state_bytes = sum(
        round(size.gradient_bytes * optimizer.state_bytes_per_byte)
        + size.num_trainable * optimizer.state_bytes_per_tensor
        for size in sizes
    )
    shard_bytes = sum(size.shard_bytes for size in sizes)
    held_gradients = sum(size.gradient_bytes for size in sizes)
    gradient_bytes = 0 if accumulation > 1 else held_gradients
    shape = (profile, class_index, section, micro_batch, accumulation, gradient_bytes)
    kept_bytes, forward_bytes, backward_bytes = _levels(*shape, copies=3 if section.is_block else 1)
    _, lone_forward_bytes, lone_backward_bytes = _levels(*shape, copies=1)
    return Recipe(
        units=section.units,
        recompute=section.recompute,
        seconds=seconds,
        # Gradients of the first micro-batch stay through the second one.
        persistent_bytes=shard_bytes + state_bytes + (held_gradients if accumulation > 1 else 0),
        kept_bytes=kept_bytes,
        gradient_bytes=gradient_bytes,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        lone_forward_bytes=min(lone_forward_bytes, forward_bytes),
        lone_backward_bytes=min(lone_backward_bytes, backward_bytes),
    )


def _levels(
    profile: Profile,
    class_index: int,
    section: SectionPlan,
    micro_batch: int,
    accumulation: int,
    gradient_bytes: int,
    *,
    copies: int,
) -> tuple[int, int, int]:
    """(kept, forward, backward) bytes of the middle of so many equal sections in the last micro-batch; see Recipe."""
    simulator = StepSimulator(profile, (section,) * copies, (class_index,) * copies)
    for _ in range(min(accumulation, 2)):
        forward, backward = simulator.play_micro_batch(micro_batch)
    middle = copies // 2
    start = forward[0].before_bytes
    kept = forward[middle].after_bytes - forward[middle].before_bytes
    before_forward = start + middle * kept
    before_backward = start + (middle + 1) * kept + (copies - middle - 1) * gradient_bytes
    return kept, forward[middle].peak_bytes - before_forward, backward[middle].peak_bytes - before_backward


def _undominated(recipes: list[Recipe]) -> tuple[Recipe, ...]:
    """The Pareto frontier; of recipes with equal figures the one with the fewest units stays."""
    figures = {
        index: (
            recipe.seconds,
            recipe.persistent_bytes,
            recipe.kept_bytes,
            recipe.gradient_bytes,
            recipe.forward_bytes,
            recipe.backward_bytes,
        )
        for index, recipe in enumerate(recipes)
    }
    order = sorted(figures, key=lambda index: (figures[index], len(recipes[index].units)))
    kept: list[int] = []
    for index in order:
        mine = figures[index]
        if not any(all(a <= b for a, b in zip(figures[other], mine, strict=True)) for other in kept):
            kept.append(index)
    return tuple(sorted((recipes[index] for index in kept), key=lambda recipe: recipe.order))
