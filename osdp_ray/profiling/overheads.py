"""What a process holds of its GPU outside the allocator of tensors, measured on the device.

The driver counts all that is taken of the device, by whom ever; what torch's allocator has reserved is taken off. So
other processes on the same device count as its context, as they should: their memory is not there to be used.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from osdp_ray.profiling.actors import MeasuringGroup

_WARM_UP_SIZE = 512
_context_bytes = 0  # of this process, noted before it opened a communicator


def note_context() -> None:
    """Takes note of the context once the kernels and libraries that training uses are loaded."""
    global _context_bytes
    for dtype in (torch.float32, torch.bfloat16):
        product = torch.ones(_WARM_UP_SIZE, _WARM_UP_SIZE, dtype=dtype, device="cuda")
        torch.nn.functional.layer_norm(product @ product, (_WARM_UP_SIZE,)).softmax(-1)
    torch.cuda.synchronize()
    _context_bytes = _held_outside()


def measure_overheads(group: "MeasuringGroup") -> tuple[int, int]:
    """(context_bytes, communicator_bytes) of the process that holds the most, (0, 0) on CPUs.

    To be asked when every kind of group has communicated.
    """
    if group.cluster.device_kind != "cuda":
        return 0, 0
    pairs = group.run(device_overheads)
    return max(context for context, _ in pairs), max(communicators for _, communicators in pairs)


def device_overheads() -> tuple[int, int]:
    """This process's context and what its communicators have added to it since."""
    return _context_bytes, max(0, _held_outside() - _context_bytes)


def _held_outside() -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()
