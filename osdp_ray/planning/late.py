"""What late reductions add to a micro-batch in which communication and computation take turns, for arrays.

The queue of `costs.streams.late_s`, of sections from the first to the last; backward goes through them the other way.
`late` and `behind` are their late_reduce_s and behind_late_s, `busy` what their backward computes.
"""

import numpy as np

from osdp_ray.planning.menus import Floats


def added_s(busy: Floats, late: Floats, behind: Floats, slowdown: float) -> float:
    """Seconds that the late reductions of these sections add; `costs.streams.late_s`."""
    waited_s = sum(_queue(busy * (1 + slowdown), late, behind))
    return waited_s + (float(late.sum()) - waited_s) * slowdown / (1 + slowdown)


def added_by_column_s(
    position: int, own: tuple[Floats, Floats, Floats], rows: tuple[Floats, Floats, Floats], slowdown: float
) -> Floats:
    """The same for every column that a section could have: `own` are its columns' figures, `rows` all sections'.

    What comes before it in backward leaves a queue; what comes after it takes what it leaves itself, as far as the next
    section that waits.
    """
    (busy, late, behind), faster = own, 1 + slowdown
    hides_s, late_s, behind_s = faster * rows[0], rows[1], rows[2]
    waiting = [index for index in range(position) if behind_s[index] > 0]
    end = waiting[-1] + 1 if waiting else 0
    earlier, through, later = slice(position + 1, None), slice(end, position), slice(end)
    waited_s, queue_s = _queue(hides_s[earlier], late_s[earlier], behind_s[earlier])
    least_s = sum(_queue(hides_s[through], late_s[through], behind_s[through]))
    waited_s += sum(_queue(hides_s[later], late_s[later], behind_s[later]))
    left = np.where(behind > 0, 0.0, np.maximum(0.0, queue_s - faster * busy)) + late
    left = np.maximum(left + late_s[through].sum() - hides_s[through].sum(), least_s)
    waited = waited_s + np.where(behind > 0, queue_s, 0.0) + left
    found: Floats = waited + (late_s.sum() + late - late_s[position] - waited) * slowdown / faster
    return found


def added_among_its_like_s(busy: Floats, late: Floats, behind: Floats, slowdown: float, *, is_first: bool) -> Floats:
    """The same of a section by itself, for every column, if its like hides what it leaves; none follows the first."""
    left = np.where((behind > 0) | is_first, late, np.maximum(0.0, late - busy * (1 + slowdown)))
    found: Floats = left + (late - left) * slowdown / (1 + slowdown)
    return found


def _queue(hides: Floats, late: Floats, behind: Floats) -> tuple[float, float]:
    """Seconds that are waited for on the way, and those that the first section leaves."""
    waited_s = queue_s = 0.0
    for hidden_s, late_s, behind_s in zip(
        hides[::-1].tolist(), late[::-1].tolist(), behind[::-1].tolist(), strict=True
    ):
        if behind_s > 0.0:
            waited_s, queue_s = waited_s + queue_s, 0.0
        queue_s = max(0.0, queue_s - hidden_s) + late_s
    return waited_s, queue_s
