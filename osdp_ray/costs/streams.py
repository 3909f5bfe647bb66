"""The step simulator, seconds: what a step takes, with computation and communication taking turns or side by side.

Taking turns (`profile.overlaps` is false: gloo on CPU) a step is the sum of everything, but for gradients of replicated
units: those are reduced late, A, in threads, while backward goes on. Computing hides them; other collectives do not:
those over the world stand behind them in the same connections. With C what a section's backward computes, a queue q of
such reductions and what is waited for w are, from the last section to the first,

    w = w + q, q = 0                         before a section with collectives over the world in backward
    q = max(0, q - C[i] (1 + s)) + A[i]      and with w + q at the end for w a micro-batch takes

                                                 ... + w + (sum A - w) s / (1 + s)

more. Side by side (nccl) a step is
played section by section as FSDP2 issues it, with F, B what a section's forward and backward keep the computing
stream busy for, G, H its gathers before forward and before backward, R the reduction of its gradients:

    forward   the gather of section i + 1 is issued when the computation of i starts, so i takes

                  beside(F[i], G[i + 1])                    and nothing hides G[0]

    backward  section i starts, the gather of i - 1 is issued, and the reduction of i + 1 still runs. On one
              communicator they run one after the other, so i takes

                  beside(B[i], R[i + 1] + H[i - 1])         and nothing hides H[last] and R[0]

              Over a communicator of its own the reduction runs beside the gather, as fast as if it were alone (at
              best: both may share wires), so the larger of both counts. Gathers that are not ahead hide nothing.

    beside(compute, link) = max(link, compute + link * s / (1 + s))

where computing beside a collective takes (1 + s) times as long: `profile.overlap_slowdown_fraction`. The end of every
backward waits for all communication, then the next micro-batch or the optimizer begins. Latencies are in the
collectives' own seconds.
"""

import itertools
from collections.abc import Sequence

from osdp_ray.costs.seconds import SectionSeconds, section_seconds
from osdp_ray.records.plan import ScatterGroup, SectionPlan, Synchronise
from osdp_ray.records.profile import Profile

PHASES_S = ("forward", "backward", "communication", "optimizer")


def step_seconds(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
    prefetch: int | None = None,
    scatter_group: ScatterGroup = "shared",
) -> dict[str, float]:
    """Seconds of a step by phase. `communication` is what computing does not hide, copies and slow-down included."""
    prefetch = profile.default_prefetch if prefetch is None else prefetch
    parts = [
        section_seconds(profile, described.class_index, section, micro_batch)
        for section, described in zip(sections, profile.sections, strict=True)
    ]
    num_reducing = accumulation if synchronise == "every" else 1
    forward_s = accumulation * sum(part.forward_s for part in parts)
    backward_s = accumulation * sum(part.backward_s for part in parts)
    total_s = 0.0
    for times, reduces in ((num_reducing, True), (accumulation - num_reducing, False)):
        if times and profile.overlaps:
            slowdown = profile.overlap_slowdown_fraction
            total_s += times * overlapped_s(
                parts, slowdown, reduces=reduces, prefetch=prefetch, scatter_group=scatter_group
            )
        elif times:
            total_s += times * sum(part.pass_s(reduces=reduces) for part in parts)
            if reduces:
                total_s += times * late_s(parts, profile.overlap_slowdown_fraction)
    return {
        "forward": forward_s,
        "backward": backward_s,
        "communication": max(0.0, total_s - forward_s - backward_s),
        "optimizer": sum(part.optimizer_s for part in parts),
    }


def late_s(parts: Sequence[SectionSeconds], slowdown_fraction: float) -> float:
    """What late reductions of a micro-batch add to it."""
    link_s = sum(part.late_reduce_s for part in parts)
    if link_s == 0.0:
        return 0.0
    waited_s = queue_s = 0.0
    for part in reversed(parts):
        if part.behind_late_s > 0.0:
            waited_s, queue_s = waited_s + queue_s, 0.0
        queue_s = max(0.0, queue_s - part.backward_busy_s(reduces=True) * (1 + slowdown_fraction)) + part.late_reduce_s
    waited_s += queue_s
    return waited_s + (link_s - waited_s) * slowdown_fraction / (1 + slowdown_fraction)


def overlapped_s(
    parts: Sequence[SectionSeconds],
    slowdown_fraction: float,
    *,
    reduces: bool,
    prefetch: int = 1,
    scatter_group: ScatterGroup = "shared",
) -> float:
    """Seconds of one micro-batch of these sections, from first to last, with communication beside computation."""
    forward_s = parts[0].gather_forward_s
    for part, ahead in itertools.pairwise(parts):
        forward_s += beside(part.forward_busy_s(), ahead.gather_forward_s, slowdown_fraction)
    forward_s += parts[-1].forward_busy_s()
    return forward_s + _backward_s(parts, slowdown_fraction, reduces, prefetch, scatter_group)


def beside(compute_s: float, link_s: float, slowdown_fraction: float) -> float:
    """Seconds until both are done when they start together; see the module's docstring."""
    return max(link_s, compute_s + link_s * slowdown_fraction / (1 + slowdown_fraction))


def _backward_s(
    parts: Sequence[SectionSeconds],
    slowdown_fraction: float,
    reduces: bool,
    prefetch: int,
    scatter_group: ScatterGroup,
) -> float:
    seconds, reduce_s = parts[-1].gather_backward_s, 0.0
    for index in range(len(parts) - 1, -1, -1):
        ahead_s = parts[index - 1].gather_backward_s if index else 0.0
        busy_s = parts[index].backward_busy_s(reduces=reduces)
        if prefetch == 0:
            seconds += busy_s + reduce_s + ahead_s
        else:
            link_s = reduce_s + ahead_s if scatter_group == "shared" else max(reduce_s, ahead_s)
            seconds += beside(busy_s, link_s, slowdown_fraction)
        reduce_s = parts[index].reduce_s if reduces else 0.0
    return seconds + reduce_s
