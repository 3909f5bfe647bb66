"""The peak memory of one step, in exact bytes.

On CUDA the caching allocator counts in every step. On CPU the profiler's allocator events are summed in sampled steps
(the 2nd and 3rd of an attempt, then every 50th):

    peak = bytes live when the step starts + max(0, highest running sum of the step's events)

Events are recorded per thread, and gloo's threads free two kinds of buffers without one: a copy that its reduce-scatter
makes, which counts as freed when the thread that waits for the collective goes on; and a buffer that the caller lets
go of sooner than gloo, for which sampled steps wait a moment after each collective. Both went missing at random and
moved the peak of a small model by 10 %.
"""

import contextlib
import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def persistent_bytes(
    model: "nn.Module", optimizer: "torch.optim.Optimizer | None", extra: "Iterable[torch.Tensor]" = ()
) -> int:
    """Bytes that stay between steps: parameters, buffers, optimizer state and `extra`, each storage counted once.

    Of a sharded tensor it is this rank's storage, padding included: FSDP2 keeps its shards padded.
    """
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    tensors: list[Any] = [*model.parameters(), *model.buffers(), *extra]
    if optimizer is not None:
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    storages = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # torch 2.13: the address of the storage, which identifies it
    return sum(storages.values())


@dataclasses.dataclass
class StepMemory:
    """What one step did to memory; filled when the step has ended. None where it was not measured."""

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    num_retries: int = 0


class AllocatorPeak:
    """Measures the peak of one step on a device of kind 'cpu' or 'cuda'."""

    def __init__(self, device_kind: str, *, sample_every: int = 50) -> None:
        self.device_kind, self.sample_every = device_kind, sample_every

    def is_sampled(self, step: int) -> bool:
        """Whether the `step`-th step of this attempt (from 1) has its peak measured."""
        if self.device_kind == "cuda":
            return True
        return step in (2, 3) or (self.sample_every > 0 and step % self.sample_every == 0)

    @contextlib.contextmanager
    def measure(self, step: int, live_bytes: Callable[[], int]) -> Iterator[StepMemory]:
        """Around the `step`-th step. `live_bytes()` is what the process's tensors hold as the step starts (CPU)."""
        memory = StepMemory()
        if not self.is_sampled(step):
            yield memory
        elif self.device_kind == "cuda":
            yield from _measure_cuda(memory)
        else:
            yield from _measure_cpu(memory, live_bytes)


def _measure_cuda(memory: StepMemory) -> Iterator[StepMemory]:
    import torch

    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    torch.cuda.reset_peak_memory_stats()
    yield memory
    memory.peak_bytes = torch.cuda.max_memory_allocated()
    memory.reserved_bytes = torch.cuda.max_memory_reserved()
    memory.num_retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries


def _measure_cpu(memory: StepMemory, live_bytes: Callable[[], int]) -> Iterator[StepMemory]:
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # below 6 every profile prints two lines to standard error
    gc.collect()  # buffers that only a cycle keeps alive would be freed within the step
    start_bytes = live_bytes()
    with _settled_collectives(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield memory
    memory.peak_bytes = start_bytes + highest_sum(allocator_events(profiler))


_COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)
_SETTLE_S = 0.001


@contextlib.contextmanager
def _settled_collectives() -> Iterator[None]:
    """Collectives return only after gloo's threads have let go of their buffers."""
    import torch.distributed as dist

    def settled(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = collective(*args, **kwargs)
            time.sleep(_SETTLE_S)
            return result

        return call

    originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    try:
        for name, collective in originals.items():
            setattr(dist, name, settled(collective))
        yield
    finally:
        for name, collective in originals.items():
            setattr(dist, name, collective)


@dataclasses.dataclass(frozen=True)
class AllocatorEvent:
    """One allocation (`num_bytes` above 0) or free on the CPU.

    `collective_end_ns` is the end of the call into torch.distributed that allocated it, None outside of one.
    """

    start_ns: int
    num_bytes: int
    address: int
    thread: int
    collective_end_ns: int | None = None


def allocator_events(profiler: Any) -> list[AllocatorEvent]:
    """The CPU allocator's events of a finished profile, in the order of time."""
    from torch._C._profiler import _EventType  # torch 2.13: the only access to addresses of single events

    events = []
    stack = [(node, None) for node in profiler.profiler.kineto_results.experimental_event_tree()]
    while stack:
        node, end_ns = stack.pop()
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                event = AllocatorEvent(node.start_time_ns, fields.alloc_size, fields.ptr, node.start_tid, end_ns)
                events.append(event)
            continue
        if node.name.startswith("c10d::"):
            end_ns = node.end_time_ns
        stack += [(child, end_ns) for child in node.children]
    return sorted(events, key=lambda event: event.start_ns)


def highest_sum(events: list[AllocatorEvent]) -> int:
    """The highest running sum of the events, 0 at the least; frees that gloo's threads did unseen are put in."""
    changes = [(event.start_ns, event.num_bytes) for event in events]
    for lost in _never_freed(events):
        if lost.collective_end_ns is None:
            continue
        later = (e.start_ns for e in events if e.thread == lost.thread and e.start_ns > lost.collective_end_ns)
        if (goes_on_ns := next(later, None)) is not None:
            changes.append((goes_on_ns - 1, -lost.num_bytes))
    changes.sort(key=lambda change: change[0])
    live_bytes = highest_bytes = 0
    for _, num_bytes in changes:
        live_bytes += num_bytes
        highest_bytes = max(highest_bytes, live_bytes)
    return highest_bytes


def _never_freed(events: list[AllocatorEvent]) -> list[AllocatorEvent]:
    """Allocations without a free up to the end, or up to the next allocation at their address."""
    live: dict[int, AllocatorEvent] = {}
    lost = []
    for event in events:
        before = live.pop(event.address, None)
        if event.num_bytes > 0:
            if before is not None:
                lost.append(before)
            live[event.address] = event
    return lost + list(live.values())


def resident_bytes() -> int:
    """The resident set of this process."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:  # no /proc: the highest so far, which is KiB on all but macOS
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
