"""The step simulator, seconds: what a step takes, with computation and communication taking turns or side by side.

Taking turns (`profile.overlaps` is false: gloo on CPU) a step is the sum of everything, but for gradients of replicated
units: those are reduced late, A, in threads, while backward goes on. Computing hides them; other collectives do not,
they share the links. With C what a section's backward computes, a queue of such reductions is, from the last section to
the first,

    q = max(0, q - C[i] (1 + s)) + A[i]      and a micro-batch takes      ... + q + (sum A - q) s / (1 + s)

more. Side by side (nccl) a step is
played section by section as FSDP2 issues it, with F, B what a section's forward and backward keep the computing
stream busy for, G, H its gathers before forward and before backward, R the reduction of its gradients:

    forward   the gather of section i + 1 is issued when the computation of i starts, so i takes

                  beside(F[i], G[i + 1])                    and nothing hides G[0]

    backward  section i starts, the gather of i - 1 is issued, and the reduction of i + 1 still runs. On one
              communicator they run one after the other, so i takes

                  beside(B[i], R[i + 1] + H[i - 1])         and nothing hides H[last] and R[0]

              On two the gather does not wait for the reduction; a section's end waits for the reduction before it.

    beside(compute, link) = max(link, compute + link * s / (1 + s))

where computing beside a collective takes (1 + s) times as long: `profile.overlap_slowdown_fraction`. The end of every
backward waits for all communication, then the next micro-batch or the optimizer begins. Latencies are in the
collectives' own seconds.
"""

import itertools
from collections.abc import Sequence

from osdp_ray.costs.seconds import SectionSeconds, section_seconds
from osdp_ray.records.plan import SectionPlan, Synchronise
from osdp_ray.records.profile import Profile

PHASES_S = ("forward", "backward", "communication", "optimizer")


def step_seconds(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
    shares_communicator: bool = True,
) -> dict[str, float]:
    """Seconds of a step by phase. `communication` is what computing does not hide, copies and slow-down included."""
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
            total_s += times * overlapped_s(parts, slowdown, reduces=reduces, shares_communicator=shares_communicator)
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
    queue_s = 0.0
    for part in reversed(parts):
        queue_s = max(0.0, queue_s - part.backward_busy_s(reduces=True) * (1 + slowdown_fraction)) + part.late_reduce_s
    return queue_s + (link_s - queue_s) * slowdown_fraction / (1 + slowdown_fraction)


def overlapped_s(
    parts: Sequence[SectionSeconds], slowdown_fraction: float, *, reduces: bool, shares_communicator: bool = True
) -> float:
    """Seconds of one micro-batch of these sections, from first to last, with communication beside computation."""
    forward_s = parts[0].gather_forward_s
    for part, ahead in itertools.pairwise(parts):
        forward_s += beside(part.forward_busy_s(), ahead.gather_forward_s, slowdown_fraction)
    forward_s += parts[-1].forward_busy_s()
    play = _backward_s if shares_communicator else _backward_of_two_s
    return forward_s + play(parts, slowdown_fraction, reduces)


def beside(compute_s: float, link_s: float, slowdown_fraction: float) -> float:
    """Seconds until both are done when they start together; see the module's docstring."""
    return max(link_s, compute_s + link_s * slowdown_fraction / (1 + slowdown_fraction))


def _backward_s(parts: Sequence[SectionSeconds], slowdown_fraction: float, reduces: bool) -> float:
    seconds, reduce_s = parts[-1].gather_backward_s, 0.0
    for index in range(len(parts) - 1, -1, -1):
        ahead_s = parts[index - 1].gather_backward_s if index else 0.0
        seconds += beside(parts[index].backward_busy_s(reduces=reduces), reduce_s + ahead_s, slowdown_fraction)
        reduce_s = parts[index].reduce_s if reduces else 0.0
    return seconds + reduce_s


def _backward_of_two_s(parts: Sequence[SectionSeconds], slowdown_fraction: float, reduces: bool) -> float:
    """The same where gathers and reductions have a communicator each."""
    ended_s = reduced_s = 0.0  # the computation and the reduction of the section before
    gathered_s = parts[-1].gather_backward_s
    for index in range(len(parts) - 1, -1, -1):
        started_s = max(ended_s, gathered_s)
        ahead_s = parts[index - 1].gather_backward_s if index else 0.0
        gathered_s = started_s + ahead_s
        compute_s = parts[index].backward_busy_s(reduces=reduces)
        link_s = max(ahead_s, reduced_s - started_s, 0.0)
        slowed_s = compute_s + link_s * slowdown_fraction / (1 + slowdown_fraction)
        ended_s = max(started_s + min(slowed_s, compute_s * (1 + slowdown_fraction)), reduced_s)
        reduced_s = ended_s + (parts[index].reduce_s if reduces else 0.0)
    return max(ended_s, reduced_s)
