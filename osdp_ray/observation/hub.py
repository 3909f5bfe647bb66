"""The way between workers and driver: an actor that keeps what workers push until the driver drains it."""

import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from osdp_ray.observation.allocator import AllocatorPeak, StepMemory, persistent_bytes, resident_bytes
from osdp_ray.records.telemetry import Sample

_PUSH_INTERVAL_S = 0.2
_FLUSH_TIMEOUT_S = 20.0
_log = logging.getLogger(__name__)

Note = tuple[str, dict[str, Any]]  # what happened ('saved', 'eval', ...) and its facts


class TelemetryHub:
    """The actor between workers and driver: keeps samples and notes until they are drained, and the command."""

    def __init__(self) -> None:
        self._command = ""
        self._items: collections.deque[Sample | Note] = collections.deque()
        self._num_drained = 0
        self._workers: dict[int, Any] = {}
        self._drained_step: dict[int, int] = {}  # newest one by rank
        self._half_drained: list[Sample] = []  # of steps that not every rank's sample has been drained of

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
            item = self._items.popleft()
            self._num_drained += 1
            if isinstance(item, Sample):
                self._drained_step[item.rank] = item.step
                self._half_drained.append(item)
        least = min((self._drained_step.get(rank, 0) for rank in self._workers), default=math.inf)
        self._half_drained = [sample for sample in self._half_drained if sample.step > least]
        return self._num_drained + len(self._items), list(self._items)

    def undrained(self) -> tuple[Sample, ...]:
        """The samples of the steps that the driver has not taken in of every rank, or has not said that it has."""
        return (*self._half_drained, *(item for item in self._items if isinstance(item, Sample)))

    def set_command(self, command: str) -> None:
        self._command = command
        if not command:  # the next attempt has workers and steps of its own
            self._workers.clear()
            self._drained_step.clear()
            self._half_drained.clear()

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

    def undrained(self) -> tuple[Sample, ...]:
        """What the hub has of samples that the driver has not; of all ranks, where all have flushed before."""
        import ray

        with contextlib.suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return ray.get(self._actor.undrained.remote(), timeout=_FLUSH_TIMEOUT_S)
        return ()

    def close(self) -> None:
        self.flush()

    def flush(self) -> None:
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
