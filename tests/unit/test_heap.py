"""Freed memory stays with a worker's process, so that the next step finds its pages."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys
import torch
from osdp_ray.modeling.heap import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    raise SystemExit(77)


def use():
    tensors = [torch.ones(size << 18) for size in (30, 20, 10)]  # MiB, as a step's buffers come and go
    del tensors


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


for _ in range(8):
    use()
before = faults()
for _ in range(8):
    use()
print(faults() - before)
"""


def page_faults(how):
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip("malloc is not glibc's")
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


def test_pages_of_freed_buffers_are_there_for_the_next():
    num_pages = 60 * 256  # of 4 KiB, what one use touches
    assert page_faults("keep") < num_pages / 10
