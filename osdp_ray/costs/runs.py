"""Long rows of equal sections, played once: a model of a thousand layers takes as long as one of ten.

In a row of equal sections every section but a few at either end adds the same to every figure, so one of the middle
stands for all of them: after it is played, what it added is added again for each of the others. The peaks of a row are
at its ends, because within it levels rise or fall evenly; those are played as they are.
"""

import dataclasses
from collections.abc import Sequence

from osdp_ray.costs.levels import SectionBytes
from osdp_ray.costs.memory import StepSimulator
from osdp_ray.records.plan import SectionPlan
from osdp_ray.records.profile import Profile

_NUM_AT_ENDS = 3  # sections of a row that are played beside the one in the middle, at either end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Sections `first` to `first + times - 1` of a model, one of which is played."""

    first: int
    times: int


def shortened(sections: Sequence[SectionPlan], class_indices: Sequence[int]) -> tuple[Row, ...]:
    """The sections to play, each with how many it stands for."""
    rows: list[Row] = []
    start = 0
    for end in range(1, len(sections) + 1):
        if end < len(sections) and _alike(sections, class_indices, start, end):
            continue
        num = end - start
        if num > 2 * _NUM_AT_ENDS + 1:
            middle = num - 2 * _NUM_AT_ENDS
            rows += [Row(first=start + i, times=1) for i in range(_NUM_AT_ENDS)]
            rows.append(Row(first=start + _NUM_AT_ENDS, times=middle))
            rows += [Row(first=end - _NUM_AT_ENDS + i, times=1) for i in range(_NUM_AT_ENDS)]
        else:
            rows += [Row(first=start + i, times=1) for i in range(num)]
        start = end
    return tuple(rows)


def _alike(sections: Sequence[SectionPlan], class_indices: Sequence[int], one: int, other: int) -> bool:
    return (
        class_indices[one] == class_indices[other]
        and sections[one].recompute == sections[other].recompute
        and (sections[one].units is sections[other].units or sections[one].units == sections[other].units)
    )


class RowSimulator(StepSimulator):
    """Plays whole models row by row; levels come out for every section."""

    def __init__(
        self,
        profile: Profile,
        sections: tuple[SectionPlan, ...],
        class_indices: tuple[int, ...],
        *,
        prefetch: int | None = None,
    ) -> None:
        self.rows = shortened(sections, class_indices)
        chosen = [row.first for row in self.rows]
        played = tuple(sections[i] for i in chosen)
        super().__init__(profile, played, tuple(class_indices[i] for i in chosen), prefetch=prefetch)
        self.times = tuple(row.times for row in self.rows)
        self.with_levels = True  # False: a micro-batch's levels are left out, peaks are all that is asked for

    def _play(self, position: int, micro_batch: int) -> SectionBytes:
        live, reduced_bytes, left_bytes = self.live, self.reduced_bytes, self.left_bytes
        played = super()._play(position, micro_batch)
        more = self.times[position] - 1
        if more:
            self.live += more * (self.live - live)
            self.reduced_bytes += more * (self.reduced_bytes - reduced_bytes)
            self.left_bytes += more * (self.left_bytes - left_bytes)
        return played

    def play_micro_batch(
        self, micro_batch: int, *, synchronises: bool = True
    ) -> tuple[list[SectionBytes], list[SectionBytes]]:
        """One micro-batch; levels of every section of the model. In backward a row's last section comes first."""
        forward, backward = super().play_micro_batch(micro_batch, synchronises=synchronises)
        if not self.with_levels:
            return [], []
        return self._written_out(forward), self._written_out(backward, is_backward=True)

    def _written_out(self, played: Sequence[SectionBytes], *, is_backward: bool = False) -> list[SectionBytes]:
        levels: list[SectionBytes] = []
        for row, level in zip(self.rows, played, strict=True):
            step = level.after_bytes - level.before_bytes
            copies = [
                SectionBytes(
                    before_bytes=level.before_bytes + i * step,
                    peak_bytes=level.peak_bytes + i * step,
                    after_bytes=level.after_bytes + i * step,
                )
                for i in range(row.times)
            ]
            levels += reversed(copies) if is_backward else copies
        return levels
