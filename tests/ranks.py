"""Real ranks of a test, each a process of its own, forked from a server that has imported what they need once."""

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

# Imported by the server before its first fork; imports start no threads, so that what is forked is whole.
_PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.profiler",
    "osdp_ray.execution",
    "tests.fake_rank",
    "tests.models",
    "tests.oracle",
)
multiprocessing.set_forkserver_preload(list(_PRELOADED))

context = multiprocessing.get_context("forkserver")


def start_ranks(work: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Runs `work(rank, *arguments)` on every rank, to its end. Raises what a rank raised."""
    torch.multiprocessing.start_processes(work, arguments, nprocs=num_ranks, start_method="forkserver")


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
