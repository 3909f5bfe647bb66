"""The measuring actors: one per device of a cluster, placed on that device's node, joined in one process group.

A MeasuringGroup runs functions on the real nodes, over the real links, before training starts. CPU actors take no
slots, so they start even where the cluster is full; GPU actors hold their GPUs through a placement group. While a
function runs, every actor is asked for a sign of life in a thread of its own, so that a node that falls silent is
named within SILENCE_S, however long the function may take. Whatever happens, leaving the group ends its actors and
gives everything back.
"""

import dataclasses
import datetime
import functools
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Self

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from osdp_ray.errors import ClusterError, OsdpError, WorkerError
from osdp_ray.modeling.heap import keep_freed_memory
from osdp_ray.profiling.interfaces import choose_interface
from osdp_ray.profiling.life import SILENCE_S, SignsOfLife
from osdp_ray.profiling.overheads import note_context
from osdp_ray.records.cluster import Cluster, Device

START_REMEDY = (
    "Check that the node is alive ('ray status'), that it can import this release of osdp_ray (install it there, or "
    "submit with 'ray job submit --working-dir .'), and that its ports are open to the other nodes. Where "
    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set, it must name an interface of that node."
)
REACH_REMEDY = (
    "Open the ports between these nodes (firewall, security group, network policy), or leave one of them out."
)
CLOCK_REMEDY = "Set the clocks of the nodes by NTP (chronyc tracking, timedatectl), or leave that node out."
MEASURE_REMEDY = "Mend that and run again; the traceback of the worker is attached to this error."
START_TIMEOUT_S = 50.0
LEAVE_TIMEOUT_S = 5.0
MOST_CLOCK_OFFSET_S = 60.0  # beyond it, times in logs, samples and saves of different nodes contradict one another
_PING_EVERY_S = 2.0
_REACH_TIMEOUT_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call on an actor came to: a value, or an error (an OsdpError, or any other as one line) with its trace."""

    value: Any = None
    error: OsdpError | str | None = None
    traceback: str = ""


def _answering(method: Callable[..., Any]) -> Callable[..., Outcome]:
    """Lets a method of the actor answer with an Outcome. Ray would print an error that is raised there, and wrap it."""

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> Outcome:
        try:
            return Outcome(value=method(*args, **kwargs))
        except OsdpError as error:
            return Outcome(error=error, traceback=traceback.format_exc())
        except Exception as error:  # the border of the process: the driver raises it with the rank
            return Outcome(error=_summary(error), traceback=traceback.format_exc())

    return answer


class MeasuringGroup:
    """Actors on every device of `cluster`, ranked as its devices are; a context manager.

    `start_timeout_s` bounds the start of the actors and the forming of the process group together;
    `collective_timeout_s` bounds each collective after that. Entering raises ClusterError, naming the node, where one
    does not answer in time, cannot be reached, or has a clock of its own. `clock_offsets_s` are the clocks of the
    ranks' nodes less the driver's.
    """

    def __init__(
        self, cluster: Cluster, *, start_timeout_s: float = START_TIMEOUT_S, collective_timeout_s: float = 120.0
    ) -> None:
        self.cluster = cluster
        self._start_timeout_s = start_timeout_s
        self._collective_timeout_s = collective_timeout_s
        self._nodes = {node.node_id: node for node in cluster.nodes}
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._free_gpus = 0.0
        self._is_joined = False
        self.clock_offsets_s: tuple[float, ...] = ()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def one_rank_per_node(self) -> tuple[int, ...]:
        """The first rank of each node: where to run what need not run on every device."""
        first: dict[str, int] = {}
        for rank, device in enumerate(self.cluster.devices):
            first.setdefault(device.node_id, rank)
        return tuple(first.values())

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, timeout_s: float = 300.0
    ) -> list[Any]:
        """What `function(*args)` returns on each of `ranks` (all by default), in their order.

        The function finds its rank, its group and its GPU by torch.distributed and torch.cuda. The first failure ends
        the call: an OsdpError as it is, anything else as a WorkerError with the rank, a lost or silent node as a
        ClusterError.
        """
        chosen = list(range(len(self._actors)) if ranks is None else ranks)
        payload = ray.put((function, args))
        references = [self._actors[rank].call.remote(payload) for rank in chosen]
        name = getattr(function, "__name__", repr(function)).strip("_")
        return self._results(dict(zip(references, chosen, strict=True)), f"measuring ({name})", timeout_s)

    def _start(self) -> None:
        devices = self.cluster.devices
        if self.cluster.device_kind == "cuda":
            self._reserve_gpus()
        self._actors = [
            _Measurer.options(**self._options(rank, device)).remote() for rank, device in enumerate(devices)
        ]
        deadline_s = time.monotonic() + self._start_timeout_s
        self._each("answer", "starting", self._start_timeout_s)
        self._compare_clocks()

        first = self._nodes[devices[0].node_id]
        port = self._results({self._actors[0].open_store.remote(first.address): 0}, "opening a port", 10.0)[0]
        left_s = max(10.0, deadline_s - time.monotonic())
        references = {
            actor.join.remote(
                rank=rank,
                num_ranks=len(devices),
                node_address=self._nodes[device.node_id].address,
                store_address=(first.address, port),
                backend=self.cluster.backend,
                join_timeout_s=left_s - 2,  # each rank's own error tells more than its silence
                timeout_s=self._collective_timeout_s,
            ): rank
            for rank, (actor, device) in enumerate(zip(self._actors, devices, strict=True))
        }
        try:
            self._results(references, f"joining the process group at {first.address}:{port}", left_s)
        except ClusterError as error:
            cut = self._unreachable_pairs()
            if not cut:
                raise
            raise ClusterError(f"{cut[0]}. So {error.problem}", REACH_REMEDY) from error
        self._is_joined = True

    def _unreachable_pairs(self) -> list[str]:
        """Which node cannot open a connection to which, in words: every node tries a port of every other one."""
        heads = self.one_rank_per_node
        nodes = [self._nodes[self.cluster.devices[rank].node_id] for rank in heads]
        ports = self._told(
            [self._actors[rank].listen.remote(node.address) for rank, node in zip(heads, nodes, strict=True)]
        )
        targets = {node.address: port for node, port in zip(nodes, ports, strict=True) if port is not None}
        reports = self._told([self._actors[rank].reach.remote(targets) for rank in heads])
        return [
            f"node {node.hostname} ({node.address}) cannot reach {address}: port {targets[address]} was tried, {reason}"
            for node, report in zip(nodes, reports, strict=True)
            for address, reason in (report or {}).items()
        ]

    def _told(self, references: list[Any]) -> list[Any]:
        """What actors answer within some seconds, None where one does not."""
        ready = set(ray.wait(references, num_returns=len(references), timeout=LEAVE_TIMEOUT_S)[0])
        found: list[Any] = []
        for reference in references:
            try:
                found.append(ray.get(reference).value if reference in ready else None)
            except ray.exceptions.RayError:
                found.append(None)
        return found

    def _compare_clocks(self) -> None:
        """Each rank's clock against the driver's, less what the question may have been under way."""
        offsets = []
        for rank, actor in enumerate(self._actors):
            asked_s = time.time()
            told_s = self._results({actor.answer.remote(): rank}, "telling the time", 10.0)[0]
            heard_s = time.time()
            offsets.append(told_s - (asked_s + heard_s) / 2)
            if abs(offsets[-1]) - (heard_s - asked_s) / 2 > MOST_CLOCK_OFFSET_S:
                way = "ahead of" if offsets[-1] > 0 else "behind"
                raise ClusterError(
                    f"the clock of {self._where([rank])} is {abs(offsets[-1]):.0f} s {way} the driver's, and "
                    f"{MOST_CLOCK_OFFSET_S:.0f} s are the most",
                    CLOCK_REMEDY,
                )
        self.clock_offsets_s = tuple(offsets)

    def _reserve_gpus(self) -> None:
        """A bundle per device on the device's node. Waits, for Ray may still be taking back what ran before."""
        self._free_gpus = ray.available_resources().get("GPU", 0.0)
        devices = self.cluster.devices
        self._placement = placement_group(
            [{"GPU": 1}] * len(devices),
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": device.node_id} for device in devices],
        )
        if not self._placement.wait(self._start_timeout_s):
            raise ClusterError(
                f"the {len(devices)} GPUs of the cluster were not free within {self._start_timeout_s:.0f} s: "
                f"{self._free_gpus:.0f} were when asked first",
                "End what else uses them ('ray status' names it), or lower --num-workers.",
            )

    def _options(self, rank: int, device: Device) -> dict[str, Any]:
        if self._placement is not None:
            bundle = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
            return {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": bundle}
        pinned = NodeAffinitySchedulingStrategy(device.node_id, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": pinned}

    def _each(self, method: str, doing: str, timeout_s: float) -> list[Any]:
        references = {getattr(actor, method).remote(): rank for rank, actor in enumerate(self._actors)}
        return self._results(references, doing, timeout_s)

    def _results(self, references: dict[Any, int], doing: str, timeout_s: float) -> list[Any]:
        began_s = time.monotonic()
        life = SignsOfLife(self._actors if self._is_joined else [])
        waiting = list(references)
        while waiting:
            left_s = began_s + timeout_s - time.monotonic()
            ready, waiting = ray.wait(waiting, timeout=max(0.0, min(_PING_EVERY_S, left_s)))
            if ready:
                self._check(ready[0], references[ready[0]], doing, life)
            elif silent := life.silent_ranks():
                problem = f"{self._where(silent)} gave no sign of life for {SILENCE_S:.0f} s while {doing}"
                raise ClusterError(problem, START_REMEDY)
            elif left_s <= 0:
                where = self._where(references[reference] for reference in waiting)
                raise ClusterError(f"{where} gave no answer while {doing}, within {timeout_s:.0f} s", START_REMEDY)
        return [outcome.value for outcome in ray.get(list(references))]

    def _check(self, reference: Any, rank: int, doing: str, life: "SignsOfLife") -> None:
        """Raises what went wrong on a rank, if its answer tells of an error or cannot come."""
        try:
            outcome = ray.get(reference)
        except ray.exceptions.RayError as error:
            problem = f"{self._where([rank])} was lost while {doing}: {_summary(error)}"
            raise ClusterError(problem, START_REMEDY) from error
        if isinstance(outcome.error, OsdpError):
            outcome.error.add_note(outcome.traceback)  # pickle drops its cause
            raise outcome.error
        if outcome.error is not None:
            where = self._where([rank])
            if not self._is_joined:
                raise ClusterError(f"{where} failed while {doing}: {outcome.error}", START_REMEDY)
            if silent := life.silent_ranks(wait_s=LEAVE_TIMEOUT_S):  # others fail for want of these
                problem = f"{self._where(silent)} gave no sign of life while {doing}: {where} has {outcome.error}"
                raise ClusterError(problem, START_REMEDY)
            failure = WorkerError(rank, f"{doing} on {where} raised {outcome.error}", MEASURE_REMEDY)
            failure.add_note(outcome.traceback)
            raise failure

    def _where(self, ranks: Iterable[int]) -> str:
        """The nodes of some ranks, for an error."""
        by_node: dict[str, list[str]] = {}
        for rank in ranks:
            by_node.setdefault(self.cluster.devices[rank].node_id, []).append(str(rank))
        return " and ".join(
            f"node {self._nodes[node_id].hostname} ({self._nodes[node_id].address}, rank {', '.join(ranks_there)})"
            for node_id, ranks_there in by_node.items()
        )

    def _stop(self) -> None:
        """Ends the actors and waits until they are gone and their GPUs are free, each for a bounded time."""
        actors, self._actors = self._actors, []
        if self._is_joined:  # leaving in order spares every rank the others' 'connection closed'
            self._is_joined = False
            ray.wait([actor.leave.remote() for actor in actors], num_returns=len(actors), timeout=LEAVE_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)
        if actors:  # a call to a dead actor fails as soon as its death is known
            ray.wait([actor.answer.remote() for actor in actors], num_returns=len(actors), timeout=LEAVE_TIMEOUT_S)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None
            deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
            while ray.available_resources().get("GPU", 0.0) < self._free_gpus and time.monotonic() < deadline_s:
                time.sleep(0.1)


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"life": 1})
class _Measurer:
    """One rank. Its calls run one after the other, `answer` beside them."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None

    @ray.method(concurrency_group="life")  # ray 2.60 does not see it through a decorator below it
    def answer(self) -> Outcome:
        """The time by this node's clock, once the actor is up."""
        return Outcome(value=time.time())

    @ray.method(concurrency_group="life")
    def listen(self, address: str) -> Outcome:
        """Opens a port that others may try, on this node's address, and returns it."""
        self._listener = socket.create_server((address, 0))
        return Outcome(value=self._listener.getsockname()[1])

    @ray.method(concurrency_group="life")
    def reach(self, targets: dict[str, int]) -> Outcome:
        """Tries every address and port for a moment: the addresses that cannot be reached, and why."""
        failed = {}
        for address, port in targets.items():
            try:
                socket.create_connection((address, port), timeout=_REACH_TIMEOUT_S).close()
            except OSError as error:
                failed[address] = error.strerror or "no answer came"
        return Outcome(value=failed)

    @_answering
    def open_store(self, address: str) -> int:
        """Opens the rendezvous of the group on a free port of this node, and returns the port."""
        timeout = datetime.timedelta(seconds=30)
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return self._store.port

    @_answering
    def join(
        self,
        *,
        rank: int,
        num_ranks: int,
        node_address: str,
        store_address: tuple[str, int],
        backend: str,
        join_timeout_s: float,
        timeout_s: float,
    ) -> None:
        # As many threads as Ray Train's workers get, so that what is measured here is what training does.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        timeout = datetime.timedelta(seconds=timeout_s)  # gloo keeps the one that it was made with
        if backend == "nccl":
            torch.cuda.set_device(0)  # Ray shows each actor its own GPU alone
            note_context()
        else:
            choose_interface(node_address)
            keep_freed_memory()
        store = self._store or dist.TCPStore(
            *store_address, is_master=False, timeout=datetime.timedelta(seconds=join_timeout_s)
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        dist.barrier()

    @_answering
    def call(self, payload: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        function, args = payload
        return function(*args)

    @_answering
    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _summary(error: BaseException) -> str:
    """An error in a line; Ray's own texts hold whole tracebacks. Where they tell a cause, that says more than the first
    line does: 'The actor died because its node has died'."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no text"]
    causes = [line for line in lines if " because " in line] if isinstance(error, ray.exceptions.RayError) else []
    return f"{type(error).__name__}: {(causes or lines)[0].rstrip('.')}"
