"""One computing thread, a quiet profiler, and no test that depends on how many cores the machine has."""

import gc
import os
import sys

import pytest

RUNS = tuple(f"tests/e2e/test_{name}.py" for name in ("run", "jobs", "sweep"))  # each on a Ray of its own
# Actors beside the runs, in the other process, so that it has seen no other Ray; then clusters, processes of their own.
FIRST = (*RUNS, "tests/distributed/test_profiling_actors.py", "tests/distributed/test_testbed.py")
# Set before torch is imported, here and in every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
# What oneDNN's bf16 products hold while they run differs from processor to processor; up to AVX2 it is nothing.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# Ray lets its workers give way to everything else (nice 15), also to the tests that run beside them.
os.environ.setdefault("RAY_worker_niceness", "0")
# torch's profiler (kineto) logs a "USDT: ... profiler_start" line to stderr each time, at levels up to 5.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def pytest_collection_modifyitems(items):
    """The longest first: whole runs, then what else starts Ray."""
    items.sort(key=lambda item: next((i for i, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file stay together, and whole runs follow one another: Ray gives up where its own processes start
    too slowly."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return RUNS[0] if nodeid.startswith(RUNS) else nodeid.split("::", 1)[0]

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Workspaces of CPU kernels grow with the threads; a worker computes with one."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def no_actor_handle_of_another_ray():
    """A handle that dies in a later Ray ends the actor of the same number there."""
    gc.collect()
