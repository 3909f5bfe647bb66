"""What a collective costs on a kind of group of a cluster, as a profile has it."""

import dataclasses
import functools
import itertools
import math
from typing import Literal

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
GroupKind = Literal["node", "across", "world"]
_MOST_FACTOR = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkCost:
    """Seconds of one collective on one kind of group: about `latency_s + num_bytes / bytes_per_s`.

    `num_bytes` is the size of the whole (gathered, or unreduced) tensor. `residual_fraction` is the median distance
    of the measurements from the fit; `residuals` are all of them: bytes, and measured over fitted seconds less one.
    `seconds` goes from one to the next in straight lines (a library changes its algorithm with the size, a switch lets
    small messages pass at once), but never to more than twice or less than half of the fit, so that one disturbed
    point misleads little, and never down where the size grows.
    """

    group: GroupKind
    collective: Collective
    latency_s: float
    bytes_per_s: float
    residual_fraction: float
    residuals: tuple[tuple[int, float], ...] = ()

    def seconds(self, num_bytes: int) -> float:
        points = self._points
        if not points:
            return self._line(num_bytes)
        for (size, taken_s), (next_size, next_s) in itertools.pairwise(points):
            if size <= num_bytes <= next_size:
                return taken_s + (next_s - taken_s) * (num_bytes - size) / (next_size - size)
        nearest, nearest_s = points[0] if num_bytes < points[0][0] else points[-1]
        return self._line(num_bytes) * nearest_s / self._line(nearest)

    def _line(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    @functools.cached_property
    def _points(self) -> tuple[tuple[int, float], ...]:
        """What was measured as (bytes, seconds), smoothed until no larger size is the faster one.

        Neighbours that fall are pooled at their geometric mean (isotonic regression: Ayer et al. 1955).
        """
        pools: list[tuple[float, int]] = []  # the mean of log seconds, and of how many sizes
        for size, residual in self.residuals:
            factor = min(max(1 + residual, 1 / _MOST_FACTOR), _MOST_FACTOR)
            pools.append((math.log(self._line(size) * factor), 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (one, count), (other, other_count) = pools[-2:]
                pools[-2:] = [((one * count + other * other_count) / (count + other_count), count + other_count)]
        smooth = [math.exp(mean) for mean, count in pools for _ in range(count)]
        return tuple((size, taken_s) for (size, _), taken_s in zip(self.residuals, smooth, strict=True))
