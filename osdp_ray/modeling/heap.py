"""Freed memory stays with the process, so that the next buffer of a step finds pages that are there.

glibc gives the top of its heap back to the kernel whenever more than a little of it is free, and takes large buffers
from the kernel one by one. A training step frees and takes its buffers over and over: the kernel then maps and clears
every page of them again, which took longer than the copies that filled them, by amounts that depend on what was freed
before. What a process holds stays at its peak instead, which a budget has to allow anyway.
"""

import ctypes

from osdp_ray.units import MIB

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST_ON_HEAP_BYTES = 32 * MIB  # the most that glibc takes (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells this process's malloc; False where it is not glibc's, and nothing changes."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP_BYTES) and mallopt(_TRIM_THRESHOLD, _NEVER))
