"""Stage 5: what every worker measures in a step, and how it reaches the driver while training runs.

    worker:  Observer  --- push, fire and forget --->  TelemetryHub (actor)  <--- drain ---  HubClient: driver
                       <--- the reply is a command ---                       <--- command ---

Peak memory is exact bytes on both kinds of device. On CUDA the caching allocator counts in every step. On CPU the
profiler's allocator events are summed in sampled steps (the 2nd and 3rd of an attempt, then every 50th), and

    peak = bytes live when the step starts + max(0, highest running sum of the step's events)

`ray.train.report` is no channel for this: it is a barrier of up to seconds.
"""

import collections
import contextlib
import dataclasses
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp_ray.errors import RecordError
from osdp_ray.records.telemetry import Sample, Telemetry

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "AllocatorPeak",
    "HubClient",
    "Note",
    "Observer",
    "Sample",
    "StepMemory",
    "Telemetry",
    "TelemetryHub",
    "load_parquet",
    "persistent_bytes",
    "save_parquet",
    "start_hub",
]

_PUSH_INTERVAL_S = 0.2
_FLUSH_TIMEOUT_S = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_log = logging.getLogger(__name__)

Note = tuple[str, dict[str, Any]]  # what happened ('saved', 'eval', ...) and its facts


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

    gc.collect()  # buffers that only a cycle keeps alive would be freed within the step
    start_bytes = live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield memory
    memory.peak_bytes = start_bytes + _highest_sum(profiler)


def _highest_sum(profiler: Any) -> int:
    """The highest running sum of the CPU allocator's events, 0 at the least."""
    from torch.autograd import DeviceType

    events = profiler.profiler.kineto_results.events()  # torch 2.13: the only access to single allocator events
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    changes.sort(key=lambda change: change[0])  # stable: events of one instant keep their order
    live_bytes = highest_bytes = 0
    for _, num_bytes in changes:
        live_bytes += num_bytes
        highest_bytes = max(highest_bytes, live_bytes)
    return highest_bytes


def resident_bytes() -> int:
    """The resident set of this process."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:  # no /proc: the highest so far, which is KiB on all but macOS
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class TelemetryHub:
    """The actor between workers and driver: keeps samples and notes until they are drained, and the command."""

    def __init__(self) -> None:
        self._command = ""
        self._items: collections.deque[Sample | Note] = collections.deque()
        self._num_drained = 0
        self._workers: dict[int, Any] = {}

    def push(self, rank: int, samples: list[Sample], notes: list[Note], worker: Any = None) -> str:
        """Takes a rank's news and answers with the command: '', 'stop' or 'replan'."""
        self._items.extend(samples)
        self._items.extend(notes)
        if worker is not None:
            self._workers[rank] = worker
        return self._command

    def drain(self, since: int) -> tuple[int, list[Sample | Note]]:
        """All items from number `since` on, and the number of the next one; those before `since` are forgotten."""
        while self._num_drained < since and self._items:
            self._items.popleft()
            self._num_drained += 1
        return self._num_drained + len(self._items), list(self._items)

    def set_command(self, command: str) -> None:
        self._command = command
        if not command:
            self._workers.clear()  # the next attempt has workers of its own

    def workers(self) -> list[Any]:
        """Handles of the workers of this attempt, for an abort."""
        return list(self._workers.values())


class HubClient:
    """The hub as the driver sees it, and what it hands to workers: `observer` is called there."""

    def __init__(self, actor: Any, run: str, sample_every: int) -> None:
        self.actor, self.run, self.sample_every = actor, run, sample_every
        self._since = 0

    def drain(self) -> tuple[list[Sample], list[Note]]:
        """What arrived since the last call, in the order of arrival."""
        import ray

        self._since, items = ray.get(self.actor.drain.remote(self._since), timeout=_FLUSH_TIMEOUT_S)
        samples = [item for item in items if isinstance(item, Sample)]
        return samples, [item for item in items if not isinstance(item, Sample)]

    def set_command(self, command: str) -> None:
        """'stop', 'replan', or '' before an attempt; workers hear of it with a reply within a few steps."""
        import ray

        ray.get(self.actor.set_command.remote(command), timeout=_FLUSH_TIMEOUT_S)

    def kill_workers(self) -> None:
        """Ends the workers of this attempt at once, without a save."""
        import ray

        for worker in ray.get(self.actor.workers.remote(), timeout=_FLUSH_TIMEOUT_S):
            ray.kill(worker)

    def close(self) -> None:
        import ray

        ray.kill(self.actor)

    def observer(self, *, rank: int, device_kind: str) -> "Observer":
        """The observer of one worker; called in the worker."""
        return Observer(
            self.actor, run=self.run, rank=rank, peak=AllocatorPeak(device_kind, sample_every=self.sample_every)
        )


def start_hub(run: str, *, sample_every: int = 50) -> HubClient:
    """Starts the hub of a run on the driver's node, under the actor name `osdp-<run>`. Ray must be connected.

    `sample_every` counts steps between two measured peaks on CPU; 0 measures the 2nd and 3rd step only.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(num_cpus=0)(TelemetryHub)
    actor = actor_class.options(name=f"osdp-{run}", scheduling_strategy=here).remote()
    return HubClient(actor, run, sample_every)


class Observer:
    """One worker's side: measures steps, buffers samples, pushes them without waiting, hears commands."""

    def __init__(self, actor: Any, *, run: str, rank: int, peak: AllocatorPeak) -> None:
        self._actor, self._rank, self._peak = actor, rank, peak
        self._samples: list[Sample] = []
        self._notes: list[Note] = []
        self._pushed_s = 0.0
        self._reply: Any = None
        self._command = ""
        self._gauges = _Gauges(run, rank)

    persistent_bytes = staticmethod(persistent_bytes)
    resident_bytes = staticmethod(resident_bytes)

    def is_sampled(self, step: int) -> bool:
        return self._peak.is_sampled(step)

    def measure(self, step: int, live_bytes: Callable[[], int]) -> contextlib.AbstractContextManager[StepMemory]:
        """See AllocatorPeak.measure; `step` counts from 1 in this attempt."""
        return self._peak.measure(step, live_bytes)

    def attend(self) -> str:
        """Announces this worker to the hub and waits for the command that holds as it starts."""
        import ray

        worker = ray.get_runtime_context().current_actor
        self._command = ray.get(self._actor.push.remote(self._rank, [], [], worker))
        return self._command

    def record(self, sample: Sample) -> None:
        """Buffers a sample and pushes the buffer where the last push is long enough ago, or a peak was measured."""
        self._samples.append(sample)
        self._gauges.set(sample)
        now_s = time.monotonic()
        if now_s - self._pushed_s >= _PUSH_INTERVAL_S or sample.peak_bytes is not None:
            self._push(now_s)

    def note(self, kind: str, **facts: Any) -> None:
        """Tells the driver that something happened."""
        self._notes.append((kind, facts))
        self._push(time.monotonic())

    def command(self) -> str:
        """The newest command that has arrived, without waiting for any."""
        import ray

        if self._reply is not None and ray.wait([self._reply], timeout=0)[0]:
            self._command = ray.get(self._reply)
            self._reply = None
        return self._command

    def close(self) -> None:
        """Pushes what is buffered and waits until the hub has it."""
        import ray

        self._push(time.monotonic(), final=True)
        with contextlib.suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            ray.get(self._reply, timeout=_FLUSH_TIMEOUT_S)

    def _push(self, now_s: float, *, final: bool = False) -> None:
        reply = self._actor.push.remote(self._rank, self._samples, self._notes)
        self._samples, self._notes, self._pushed_s = [], [], now_s
        if self._reply is None or final:  # else an earlier reply is still on its way, and is the one to look at
            self._reply = reply


class _Gauges:
    """The newest sample as Ray metrics `ray_osdp_*` with the tags run and rank; a gauge that fails is given up."""

    _NAMES = (
        ("osdp_step_seconds", "Seconds of the newest optimizer step"),
        ("osdp_samples_per_second", "Samples per second of all ranks in the newest step"),
        ("osdp_peak_bytes", "Highest bytes allocated in the newest measured step"),
        ("osdp_loss", "Mean loss over the newest global batch"),
    )

    def __init__(self, run: str, rank: int) -> None:
        self._tags = {"run": run, "rank": str(rank)}
        self._gauges: list[Any] | None = None

    def set(self, sample: Sample) -> None:
        per_s = sample.num_samples / sample.step_s if sample.step_s > 0 else 0.0
        try:
            if self._gauges is None:
                from ray.util.metrics import Gauge

                self._gauges = [Gauge(name, text, tag_keys=("run", "rank")) for name, text in self._NAMES]
            for gauge, value in zip(self._gauges, (sample.step_s, per_s, sample.peak_bytes, sample.loss), strict=False):
                if value is not None:
                    gauge.set(value, tags=self._tags)
        except (ImportError, RuntimeError, ValueError, TypeError) as error:
            _log.warning("metrics of rank %s are off: %s", self._tags["rank"], error)
            self._gauges = []


_COLUMNS = {int: "int64", float: "float64", int | None: "int64"}


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field(f.name, getattr(pa, _COLUMNS[f.type])(), nullable=f.type == (int | None))  # type: ignore[index]
            for f in dataclasses.fields(Sample)
        ]
    )


def save_parquet(telemetry: Telemetry, path: str | os.PathLike[str]) -> None:
    """Writes one row per sample, one column per field of Sample, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [dataclasses.asdict(sample) for sample in telemetry.samples]
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_parquet(path: str | os.PathLike[str]) -> Telemetry:
    """Reads what `save_parquet` wrote. Raises RecordError for a missing, damaged or other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open(path, "rb") as file:
            table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise RecordError(str(path), f"it is no readable Parquet file ({str(error).splitlines()[0]})") from error
    names = [field.name for field in dataclasses.fields(Sample)]
    if missing := [name for name in names if name not in table.column_names]:
        raise RecordError(str(path), f"it has no column {missing[0]!r}, so it is no telemetry of this release")
    return Telemetry(samples=tuple(Sample(**row) for row in table.select(names).to_pylist()))
