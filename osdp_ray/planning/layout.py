"""The model as the integer program sees it: slots, and where the sections of a solution stand.

A slot is a run of neighbouring sections of one class. Short runs are taken apart into slots of one section, so that
every order of their columns can be chosen. In a long one columns stand in a canonical order, and a solution says only
how often each is used. Equal columns of a slot make a stretch.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from osdp_ray.planning.menus import Menu, StepShape
from osdp_ray.records.plan import SectionPlan
from osdp_ray.records.profile import Profile

MAX_TAKEN_APART = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Sections `first` to `first + num - 1` of the model, all of one class."""

    class_index: int
    first: int
    num: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a section stands: in which slot, with which column, as number `index` of `num` of its stretch."""

    slot: int
    column: int
    index: int
    num: int

    @property
    def stretch(self) -> tuple[int, int]:
        return self.slot, self.column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A profile's slots with their menus at a step shape."""

    profile: Profile
    shape: StepShape
    slots: tuple[Slot, ...]
    menus: tuple[Menu, ...]  # by class

    def menu(self, slot: int) -> Menu:
        return self.menus[self.slots[slot].class_index]

    @property
    def fixed_bytes(self) -> int:
        """What is there whatever is chosen."""
        profile = self.profile
        return (
            profile.buffer_bytes
            + profile.calibration.peak_offset_bytes
            + self.shape.micro_batch * profile.batch_bytes_per_sample
        )

    @property
    def is_taken_apart(self) -> bool:
        """Whether every section has a slot of its own, so that the program knows every order."""
        return all(slot.num == 1 for slot in self.slots)

    def canonical(self, slot: int, columns: Sequence[int]) -> list[int]:
        """Columns of a slot in their canonical order."""
        return canonical(self.menu(slot), columns)

    def places(self, counts: Sequence[dict[int, int]]) -> list[Place]:
        """A place for every section of the model, in its order. `counts` are by slot and column."""
        places = []
        for slot, chosen in enumerate(counts):
            for column in self.canonical(slot, list(chosen)):
                places += [Place(slot=slot, column=column, index=i, num=chosen[column]) for i in range(chosen[column])]
        return places

    def written_out(self, places: Sequence[Place]) -> tuple[SectionPlan, ...]:
        """A plan for every section."""
        return tuple(
            self.menu(place.slot).section(place.column, section.name)
            for section, place in zip(self.profile.sections, places, strict=True)
        )

    def peak_at_least(self, choose: Sequence[int]) -> float:
        """Bytes that a plan with one column per class needs at the end of its forward, at least."""
        total = float(self.fixed_bytes)
        for slot in self.slots:
            menu, column = self.menus[slot.class_index], choose[slot.class_index]
            total += slot.num * (menu.persistent[column] + menu.base[-1][column] + menu.kept[-1][column])
        return total


def canonical(menu: Menu, columns: Sequence[int]) -> list[int]:
    """Columns of a menu in the order in which they stand along the model.

    Backward runs from the last section to the first, and the order with the lowest peak is Johnson's (Johnson, Naval
    Research Logistics 1(1), 1954): sections that lower the level come first, the smallest peak leading, then those that
    raise it, the smallest remainder (peak above what is left) trailing.
    """
    kept, after, backward = menu.kept[-1], menu.after[-1], menu.backward[-1]

    def key(column: int) -> tuple[float, ...]:
        raised = after[column] - kept[column]
        if raised <= 0:
            return (1, -backward[column], -raised, column)
        return (0, backward[column] - raised, raised, column)

    return sorted(columns, key=key)


def build_layout(profile: Profile, shape: StepShape) -> Layout:
    """The slots of a profile and the menus of its classes at a step shape."""
    menus = tuple(Menu(profile, index, shape) for index in range(len(profile.classes)))
    return Layout(profile=profile, shape=shape, slots=tuple(_slots(profile)), menus=menus)


def _slots(profile: Profile) -> Iterator[Slot]:
    classes = [section.class_index for section in profile.sections]
    borders = [0, *(i for i in range(1, len(classes)) if classes[i] != classes[i - 1]), len(classes)]
    for first, end in itertools.pairwise(borders):
        if end - first <= MAX_TAKEN_APART:
            yield from (Slot(class_index=classes[first], first=i, num=1) for i in range(first, end))
        else:
            yield Slot(class_index=classes[first], first=first, num=end - first)


def compute_s(profile: Profile, shape: StepShape) -> float:
    """Seconds that no plan of this shape undercuts: computing alone, nothing recomputed."""
    factor, classes = profile.calibration.compute_factor, [section.class_index for section in profile.sections]
    counts = np.bincount(classes, minlength=len(profile.classes))
    return shape.accumulation * sum(
        float(number) * factor * (cost.forward_s(shape.micro_batch) + cost.backward_s(shape.micro_batch))
        for number, cost in zip(counts, profile.compute, strict=True)
    )
