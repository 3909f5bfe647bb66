"""Which of several workers' failures is shown."""

import pytest
from ray.exceptions import RayActorError

from osdp_ray.errors import DivergedError, UsageError, WorkerError, WorkerMemoryError, WorkloadError
from osdp_ray.execution.failures import translate


class TrainError(Exception):
    """Shaped like Ray Train's WorkerGroupError."""

    def __init__(self, failures):
        super().__init__("failed")
        self.worker_failures = failures


BROKEN = RuntimeError("gloo: Connection closed by peer")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: BROKEN, 1: WorkerError(1, "ValueError: boom", "Mend it")}, "worker 1 failed: ValueError: boom"),
        ({0: BROKEN, 1: WorkerMemoryError(1, "no room", "Lower it")}, "worker 1 ran out of memory: no room. Lower it"),
        ({0: BROKEN, 1: RayActorError(error_msg="killed")}, "worker 1 failed: its process died (killed)"),
        (
            {0: BROKEN, 2: RayActorError(error_msg="Killed due to the node running low on memory.")},
            "worker 2 ran out of memory: Killed due to the node running low on memory. Lower",
        ),
        (
            {0: BROKEN, 2: RayActorError(error_msg="It died. Causes: (1) SIGKILL by OOM killer (2) SIGSEGV.")},
            "worker 2 failed: its process died (It died. Causes: (1) SIGKILL by OOM killer (2) SIGSEGV)",
        ),
        ({0: BROKEN, 1: UsageError("Give another --data.")}, "Give another --data."),
        (
            {
                0: RayActorError(error_msg="killed"),
                1: WorkloadError("loss", "raised KeyError: 'x'", "a.py:3", "Mend it."),
            },
            "the workload's loss raised KeyError: 'x' (a.py:3). Mend it.",
        ),
        ({0: BROKEN, 1: DivergedError(7, "the loss is nan", "")}, "training diverged: the loss is nan in step 7."),
    ],
)
def test_the_first_cause_is_shown_not_the_connections_that_broke_with_it(failures, expected):
    assert str(translate(TrainError(failures))).startswith(expected)


def test_a_failure_without_a_rank_is_the_workers():
    assert str(translate(RuntimeError("no placement"))).startswith("the workers failed: no placement. See 'ray status'")
