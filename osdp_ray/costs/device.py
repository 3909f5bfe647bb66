"""What a device holds beside tensors, and what of a budget is left for them.

The lines: `allocator`, what a caching allocator reserves beyond what tensors hold; `context`, the driver's; and
`communicators`, NCCL's buffers. On CPUs there are none. What gloo copies is in the peak: it is tensors.
"""

import math

from osdp_ray.records.plan import ScatterGroup
from osdp_ray.records.profile import Profile


def held_beside(profile: Profile, peak_bytes: int, scatter_group: ScatterGroup = "shared") -> dict[str, int]:
    """Bytes beside a peak of tensors, by line; lines without any are left out."""
    lines = {
        "allocator": math.ceil(peak_bytes * profile.calibration.reserved_fraction),
        "context": profile.context_bytes,
        "communicators": _communicator_bytes(profile, scatter_group),
    }
    return {name: num_bytes for name, num_bytes in lines.items() if num_bytes}


def tensor_budget_bytes(profile: Profile, budget_bytes: int, scatter_group: ScatterGroup = "shared") -> int:
    """The highest peak of tensors with which a device holds no more than `budget_bytes`."""
    left_bytes = budget_bytes - profile.context_bytes - _communicator_bytes(profile, scatter_group)
    fraction = profile.calibration.reserved_fraction
    peak_bytes = int(left_bytes / (1 + fraction)) + 1
    while peak_bytes > 0 and peak_bytes + math.ceil(peak_bytes * fraction) > left_bytes:  # once or twice: rounding
        peak_bytes -= 1
    return max(0, peak_bytes)


def _communicator_bytes(profile: Profile, scatter_group: ScatterGroup) -> int:
    """What communicators hold: a group of its own for reductions is one more beside the world's."""
    return profile.communicator_bytes * (2 if scatter_group == "own" else 1)
