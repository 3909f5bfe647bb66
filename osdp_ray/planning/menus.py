"""The menu: every way to run a section of a class, with its bytes by lifetime and its seconds, dominated ones dropped.

A recipe is one choice per operator and one way to recompute. Its bytes are read off the step simulator, once between
neighbours that hold nothing and once between neighbours of the same recipe.
"""

import dataclasses
import itertools

from osdp_ray.costs import SectionBytes, StepSimulator, section_seconds, table_of
from osdp_ray.records.plan import Choice, SectionPlan, Unit
from osdp_ray.records.profile import Profile, Recompute, SectionClass

DP = Choice(shard_over="none", regather=True)  # FSDP2 copies replicated parameters; copying again costs no link
ZERO2 = Choice(shard_over="world", regather=False)
ZERO3 = Choice(shard_over="world", regather=True)
CHOICES = (DP, ZERO2, ZERO3)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_SMALL_FRACTION = 0.05  # operators below this share of their section's parameters follow its first unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to run the sections of a class. Levels are those of costs.SectionBytes.

    persistent_bytes  held between steps
    kept_bytes        what its forward adds to the level
    gradient_bytes    what is left of it above the level after its backward
    forward_bytes     highest in its forward, above the level before it, without any buffer of a neighbour
    backward_bytes    the same of its backward (its own kept bytes are below that level)
    inner_forward_bytes, inner_backward_bytes  the same between neighbours of the same recipe
    """

    units: tuple[Unit, ...]
    recompute: Recompute
    seconds: float
    persistent_bytes: int
    kept_bytes: int
    gradient_bytes: int
    forward_bytes: int
    backward_bytes: int
    inner_forward_bytes: int
    inner_backward_bytes: int

    def section(self, name: str, *, is_block: bool) -> SectionPlan:
        return SectionPlan(name=name, is_block=is_block, recompute=self.recompute, units=self.units)

    @property
    def order(self) -> tuple[object, ...]:
        """Canonical order along the model: recomputed blocks first, those that keep most last."""
        choices = tuple((unit.choice.shard_over, unit.choice.regather, unit.operators) for unit in self.units)
        return (-RECOMPUTES.index(self.recompute), self.kept_bytes, self.persistent_bytes, choices)


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
    shape = (profile, class_index, section, micro_batch, accumulation)
    forward, backward = _levels(*shape, inner=False)
    kept_bytes = forward.after_bytes - forward.before_bytes
    figures = (forward.peak_bytes - forward.before_bytes, backward.peak_bytes - backward.before_bytes)
    inner = figures
    if section.is_block:
        inner_forward, inner_backward = _levels(*shape, inner=True)
        inner = (
            inner_forward.peak_bytes - inner_forward.before_bytes,
            inner_backward.peak_bytes - inner_backward.before_bytes,
        )
    return Recipe(
        units=section.units,
        recompute=section.recompute,
        seconds=seconds,
        # Gradients of the first micro-batch stay through the second one.
        persistent_bytes=shard_bytes + state_bytes + (held_gradients if accumulation > 1 else 0),
        kept_bytes=kept_bytes,
        gradient_bytes=backward.after_bytes - backward.before_bytes + kept_bytes,
        forward_bytes=figures[0],
        backward_bytes=figures[1],
        inner_forward_bytes=inner[0],
        inner_backward_bytes=inner[1],
    )


def _levels(
    profile: Profile, class_index: int, section: SectionPlan, micro_batch: int, accumulation: int, *, inner: bool
) -> tuple[SectionBytes, SectionBytes]:
    """The section's forward and backward in the last micro-batch, between neighbours of its recipe or without units.

    Neighbours without units keep what passes between sections right, and add nothing of their own.
    """
    sections: tuple[SectionPlan, ...] = (section,) * 3
    classes: tuple[int, ...] = (class_index,) * 3
    middle = 1
    if not inner:
        sections, classes, middle = _among_neighbours(profile, class_index, section)
    simulator = StepSimulator(profile, sections, classes)
    for _ in range(min(accumulation, 2)):
        forward, backward = simulator.play_micro_batch(micro_batch)
    return forward[middle], backward[middle]


def _among_neighbours(
    profile: Profile, class_index: int, section: SectionPlan
) -> tuple[tuple[SectionPlan, ...], tuple[int, ...], int]:
    """(sections, classes, position): the section with the ones before and after it in the model, without units."""
    members = [p for p, described in enumerate(profile.sections) if described.class_index == class_index]
    position = members[len(members) // 2]
    chosen = range(max(0, position - 1), min(len(profile.sections), position + 2))
    sections, classes = [], []
    for neighbour in chosen:
        index = profile.sections[neighbour].class_index
        is_block = profile.classes[index].is_block
        recompute = section.recompute if is_block and section.is_block else "none"
        empty = SectionPlan(name="", is_block=is_block, recompute=recompute, units=())
        sections.append(section if neighbour == position else empty)
        classes.append(index)
    return tuple(sections), tuple(classes), position - chosen.start


def _undominated(recipes: list[Recipe]) -> tuple[Recipe, ...]:
    """The Pareto frontier; of recipes with equal figures the one with the fewest units stays."""
    order = sorted(recipes, key=lambda recipe: (_figures(recipe), len(recipe.units)))
    kept: list[tuple[float, ...]] = []
    frontier = []
    for recipe in order:
        mine = _figures(recipe)
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in kept):
            kept.append(mine)
            frontier.append(recipe)
    return tuple(sorted(frontier, key=lambda recipe: recipe.order))


def _figures(recipe: Recipe) -> tuple[float, ...]:
    """What a section of this recipe takes of time, and of memory at every moment of a step.

    Bytes held always count in every moment, so a recipe that holds more always and less in between is dominated
    where the sums are.
    """
    always, kept = recipe.persistent_bytes, recipe.persistent_bytes + recipe.kept_bytes
    return (
        recipe.seconds,
        always,
        kept,
        always + recipe.gradient_bytes,
        always + recipe.forward_bytes,
        kept + recipe.backward_bytes,
        always + recipe.inner_forward_bytes,
        kept + recipe.inner_backward_bytes,
    )
