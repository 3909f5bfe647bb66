"""What Ray Train raises -> the one OsdpError that says why: the first cause, not what it dragged along.

When one rank fails, the others fail in their next collective. So causes are ranked: memory that ran out, an error of
this package (bad data, a damaged save, the workload's own code), a worker process that died, other errors, and last
broken connections.
"""

from typing import Any

from osdp_ray.errors import OsdpError, WorkerError, WorkerMemoryError
from osdp_ray.modeling.user_code import BROKEN_CONNECTION

_RAY_KILLED = ("running low on memory", "memory usage threshold")
_NO_MEMORY = ("out of memory", "oom")
_DIED = "Look at its node's memory and logs; go on from the last save with --resume"
_MEMORY = "Lower --memory-budget so that the plan leaves more room, lower --micro-batch, or add memory"


def translate(error: Exception) -> OsdpError:
    """The error to show for what `TorchTrainer.fit` raised."""
    failures: dict[int, Any] = getattr(error, "worker_failures", None) or {}
    if not failures:
        cause = getattr(error, "controller_failure", error)
        return WorkerError(-1, _first_line(cause), "See 'ray status' for the cluster; go on with --resume where saved")
    causes = [_cause(rank, failure) for rank, failure in sorted(failures.items())]
    return min(causes, key=_order)


def _cause(rank: int, failure: Any) -> OsdpError:
    """One rank's failure as an OsdpError that names the rank."""
    if isinstance(failure, OsdpError):
        return failure
    inner = getattr(failure, "health_check_failure", failure)
    text = _first_line(inner)
    has_died = type(inner).__name__ in ("ActorDiedError", "ActorUnavailableError", "RayActorError")
    words = str(inner).lower()
    # Of a process that died by any signal Ray says that memory may have been the cause; it knows only if it did it.
    if any(known in words for known in _RAY_KILLED) or (not has_died and any(word in words for word in _NO_MEMORY)):
        return WorkerMemoryError(rank, text.rstrip("."), _MEMORY)
    if inner is not failure or has_died:
        return WorkerError(rank, f"its process died ({text.rstrip('.')})", _DIED)
    return WorkerError(rank, f"{type(inner).__name__}: {text}", _DIED)


def _order(error: OsdpError) -> int:
    if isinstance(error, WorkerMemoryError):
        return 0
    if not isinstance(error, WorkerError):
        return 1
    if error.problem.startswith("its process died"):
        return 2
    return 4 if any(words in error.problem.lower() for words in BROKEN_CONNECTION) else 3


def _first_line(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
