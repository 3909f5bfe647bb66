"""Stage 1: Ray -> Cluster. Connects to Ray and lists the devices that a run may use.

Ray knows how many GPUs and CPU slots a node has, and nothing of a GPU's memory, so every node with GPUs is asked by a
task that runs there and reads NVML. Where the cluster has a GPU, only GPUs are used; else every CPU slot is a device.
"""

import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from osdp_ray.errors import ClusterError, OsdpError, UsageError
from osdp_ray.records.cluster import Cluster, Device, Node
from osdp_ray.units import MIB

CPU_SLOTS_PER_CORE = 4  # the embedded Ray may be oversubscribed by this much: several small workers on one laptop
OBJECT_STORE_BYTES = 200 * MIB  # no tensor travels through it, only settings and samples
CENSUS_TIMEOUT_S = 60.0

IMPORT_REMEDY = (
    "Check that the node is alive ('ray status') and has this release of osdp_ray and its requirements: install them "
    "there, or submit with 'ray job submit --working-dir .'."
)
START_REMEDY = "Start one with 'ray start --head', give its address by --address HOST:PORT, or leave --address out."


def connect(address: str | None, *, num_workers: int | None, timeout_s: float = 30.0) -> None:
    """Connects this process to Ray; where it is connected already, nothing happens.

    Without an address, RAY_ADDRESS counts (`ray job submit` sets it), and without that a Ray is started inside this
    process's session: 4 CPU slots per core, shut down with the process. An address is 'HOST:PORT', 'ray://HOST:PORT',
    'auto' (the cluster that runs on this machine) or 'local' (start one).
    Raises ClusterError within about `timeout_s` where nothing answers, leaving nothing behind.
    """
    if ray.is_initialized():
        return
    # An actor handle of an earlier session that dies only now would end the actor of the same number in this one:
    # Ray numbers actors anew in every session.
    gc.collect()
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        _start_embedded(num_workers)
    else:
        _attach(address, time.monotonic() + timeout_s)


def discover(*, num_workers: int | None = None) -> Cluster:
    """The devices of the connected cluster, or `num_workers` of them on as few nodes as the packing allows.

    The order is the driver's node first, then the nodes with the most devices, then the node id; the devices of a
    node stand side by side. Raises ClusterError where there are too few, or where a GPU node does not answer.
    """
    if not ray.is_initialized():
        connect(None, num_workers=num_workers)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = _gpu_census([node for node in nodes if count_gpus(node)])
    return select_devices(nodes, gpus, ray.get_runtime_context().get_node_id(), num_workers)


def _start_embedded(num_workers: int | None) -> None:
    """A Ray of this process alone. It needs no network and writes nothing outside Ray's temporary folder."""
    num_slots = CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)
    if num_workers is not None and num_workers > num_slots and not _has_gpu_driver():
        raise too_many_workers(num_workers, num_slots, f"CPU slots ({CPU_SLOTS_PER_CORE} per core of this machine)")
    if not _has_auth_settings():
        # Ray would turn token authentication on by itself and leave a token file in the home folder, readable by all.
        # A token in the environment gives the same protection to this cluster alone.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    remedy = "See the newest folder below /tmp/ray for its logs; try again where the machine is less busy."
    settings = {"num_cpus": num_slots, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    for is_last in (False, True):
        try:
            with _callers_sigterm(), _cluster_errors("Ray did not start on this machine", remedy):
                ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **settings)
            return
        except ClusterError as error:
            if is_last or "timed out during startup" not in str(error):  # ray 2.60 gives its own processes 30 s
                raise


def _has_auth_settings() -> bool:
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(name in os.environ for name in names) or (Path.home() / ".ray" / "auth_token").exists()


def _has_gpu_driver() -> bool:
    """Whether this machine may have GPUs, which then are the devices and are counted after the start."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def _attach(address: str, deadline_s: float) -> None:
    """Joins a running cluster. Asks its port first, because Ray itself retries for a minute and more."""
    host, port = _resolve(address)
    name = address if address != "auto" else f"auto ({host}:{port})"
    _probe(name, host, port, deadline_s, is_client=address.startswith("ray://"))
    remedy = (
        "Run the job on a machine of the cluster, or submit it there by 'ray job submit -- ...'; a cluster with token "
        "authentication needs the same RAY_AUTH_MODE and RAY_AUTH_TOKEN here."
    )
    problem = f"the Ray at {name} answers and does not let this process in"
    with _callers_sigterm(), _cluster_errors(problem, remedy), _limit(deadline_s):
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def _resolve(address: str) -> tuple[str, int]:
    """Host and port that Ray would connect to for an address that a user gave."""
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{address} is the address of a dashboard, which takes jobs and no drivers",
            f"Run 'ray job submit --address {address} -- ...', or give the cluster's HOST:PORT (port 6379 by default).",
        )
    found: str | None = address.removeprefix("ray://")
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ClusterError(
                f"{address!r} is no address of a cluster", "Write --address HOST:PORT, such as head:6379."
            )
    if not address.startswith("ray://"):
        # Ray 2.60 finds the local cluster for 'auto' and puts this machine's address for a loopback one, and has no
        # public name for either.
        found = ray._private.services.canonicalize_bootstrap_address(address)
    if found is None:
        raise ClusterError("no Ray cluster runs on this machine, and the address is 'auto'", START_REMEDY)
    host, _, port = found.rpartition(":")
    return host.strip("[]"), int(port)


def _probe(name: str, host: str, port: int, deadline_s: float, *, is_client: bool) -> None:
    """Raises ClusterError unless a Ray listens there. Ray's control service answers gRPC's standard health check."""
    try:
        with socket.create_connection((host, port), timeout=min(10.0, _left_s(deadline_s))):
            pass
    except OSError as error:
        reason = "nothing answered in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ClusterError(f"no Ray cluster answers at {name}: {reason}", START_REMEDY) from error
    if is_client or os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    import grpc

    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=min(10.0, _left_s(deadline_s)))
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                problem = f"something listens at {name} and is no Ray cluster ({error.code().name.lower()})"
                raise ClusterError(problem, START_REMEDY) from error


@contextlib.contextmanager
def _cluster_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turns what `ray.init` raises into a ClusterError, with nothing of the attempt left."""
    try:
        yield
    except BaseException as error:
        ray.shutdown()
        if type(error) is not Exception and not isinstance(error, _OF_RAY):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ClusterError(f"{problem}: {first_line}", remedy) from error


_OF_RAY = (ray.exceptions.RayError, RuntimeError, ValueError, OSError, AssertionError)  # and Exception itself


@contextlib.contextmanager
def _callers_sigterm() -> Iterator[None]:
    """Lets a SIGTERM handler of the caller's count within the block and after it: `ray.init` sets ones that exit."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit:  # one of Ray's handlers has heard it
        signal.signal(signal.SIGTERM, handler)
        handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


class _Deadline(BaseException):
    """Ray retries on every Exception, so only another kind ends its loops."""


@contextlib.contextmanager
def _limit(deadline_s: float) -> Iterator[None]:
    """Ends the block at the deadline with a TimeoutError. Signals reach the main thread only; elsewhere no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise _Deadline

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _left_s(deadline_s))
    try:
        yield
    except _Deadline as error:
        raise TimeoutError("no answer in time") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _left_s(deadline_s: float) -> float:
    return max(0.1, deadline_s - time.monotonic())


def select_devices(
    nodes: list[dict[str, Any]],
    gpus: dict[str, tuple[Device, ...]],
    driver_node_id: str,
    num_workers: int | None,
) -> Cluster:
    """The cluster record from what `ray.nodes()` says of the living nodes and the GPUs found on each node id.

    A node's memory is Ray's `memory` resource: what was available (by the container's limit, if there is one) when the
    node started, less the object store, or what the administrator gave by `ray start --memory`. A CPU device gets an
    equal part of it, counting the devices that are used there; Ray does not tell how much of it is taken since, so
    all of it is given as free.
    """
    if num_workers is not None and num_workers < 1:
        raise UsageError(f"{num_workers} workers cannot train. Give --num-workers 1 or more.")
    what = "GPUs" if gpus else "CPU slots"
    counts = {node["NodeID"]: len(gpus.get(node["NodeID"], ())) if gpus else _count_cpus(node) for node in nodes}
    available = sum(counts.values())
    if available == 0:
        raise ClusterError(
            f"the cluster has neither a GPU nor a CPU slot on its {len(nodes)} nodes",
            "Add worker nodes, or start the head with --num-cpus above 0.",
        )
    wanted = available if num_workers is None else num_workers
    if wanted > available:
        raise too_many_workers(wanted, available, f"{what} on {sum(count > 0 for count in counts.values())} nodes")

    packed = sorted(nodes, key=lambda node: (node["NodeID"] != driver_node_id, -counts[node["NodeID"]], node["NodeID"]))
    used: list[Node] = []
    devices: list[Device] = []
    for raw in packed:
        num_devices = min(counts[raw["NodeID"]], wanted - len(devices))
        if num_devices == 0:
            continue
        node = _node(raw)
        used.append(node)
        devices += gpus[node.node_id][:num_devices] if gpus else _cpu_devices(node, num_devices)
    return Cluster(nodes=tuple(used), devices=tuple(devices))


def count_gpus(node: dict[str, Any]) -> int:
    """Whole GPUs that Ray may hand out on a node of `ray.nodes()`."""
    return int(node["Resources"].get("GPU", 0))


def too_many_workers(wanted: int, available: int, of_what: str) -> ClusterError:
    """The error of a run that asks for more workers than there are devices."""
    return ClusterError(
        f"{wanted} workers were asked for and the cluster has {available} {of_what}",
        f"Give --num-workers {available} or fewer, or add nodes to the cluster.",
    )


def _count_cpus(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("CPU", 0))


def _node(raw: dict[str, Any]) -> Node:
    return Node(
        node_id=raw["NodeID"],
        address=raw["NodeManagerAddress"],
        hostname=raw["NodeManagerHostname"],
        num_cpus=float(raw["Resources"].get("CPU", 0)),
        memory_bytes=int(raw["Resources"].get("memory", 0)),
    )


def _cpu_devices(node: Node, num_devices: int) -> list[Device]:
    share_bytes = node.memory_bytes // num_devices
    return [
        Device(
            node_id=node.node_id,
            index=index,
            kind="cpu",
            name="CPU",
            uuid=f"cpu-{node.node_id}-{index}",
            memory_bytes=share_bytes,
            free_bytes=share_bytes,
        )
        for index in range(num_devices)
    ]


def _gpu_census(nodes: list[dict[str, Any]]) -> dict[str, tuple[Device, ...]]:
    """Node id -> its GPUs. All nodes are asked at once, by tasks that take no resources and so never wait for any."""
    references = {}
    for node in nodes:
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=pinned)(list_gpus)
        references[task.remote(node["NodeID"], node["NodeManagerHostname"], count_gpus(node))] = node
    if not references:
        return {}
    ready, late = ray.wait(list(references), num_returns=len(references), timeout=CENSUS_TIMEOUT_S)
    if late:
        for reference in late:
            ray.cancel(reference, force=True)
        names = ", ".join(_name(references[reference]) for reference in late)
        raise ClusterError(
            f"{names} did not list its GPUs within {CENSUS_TIMEOUT_S:.0f} s",
            "Check it with 'ray status' and its log folder, and restart or remove that node.",
        )
    census = {}
    for reference in ready:
        node = references[reference]
        try:
            census[node["NodeID"]] = tuple(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OsdpError):
                raise error.cause from None
            raise ClusterError(f"listing the GPUs of {_name(node)} failed: {error.cause!r}", IMPORT_REMEDY) from error
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{_name(node)} died while listing its GPUs: {error}", IMPORT_REMEDY) from error
    return census


def list_gpus(node_id: str, hostname: str, num_gpus: int) -> list[Device]:
    """The first `num_gpus` GPUs that this process may see, read by NVML, which needs no CUDA context.

    Runs on the node. CUDA_VISIBLE_DEVICES (indices, UUIDs or MIG instances) restricts and orders, as for CUDA.
    Raises ClusterError, naming the node, where NVML is missing or fails.
    """
    remedy = "Install nvidia-ml-py and the NVIDIA driver there, or start that node with --num-gpus 0."
    try:
        import pynvml
    except ImportError as error:
        raise ClusterError(f"node {hostname} has {num_gpus} GPUs for Ray and no pynvml: {error}", remedy) from error
    try:
        pynvml.nvmlInit()
        try:
            devices = []
            for index, handle in enumerate(_visible_gpus(pynvml)[:num_gpus]):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                devices.append(
                    Device(
                        node_id=node_id,
                        index=index,
                        kind="cuda",
                        name=_text(pynvml.nvmlDeviceGetName(handle)),
                        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                        memory_bytes=int(memory.total),
                        free_bytes=int(memory.free),
                    )
                )
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ClusterError(f"node {hostname} has {num_gpus} GPUs for Ray and NVML says: {error}", remedy) from error
    if len(devices) < num_gpus:
        raise ClusterError(
            f"node {hostname} has {num_gpus} GPUs for Ray and NVML sees {len(devices)}",
            f"Start that node with --num-gpus {len(devices)}, or make the others visible there.",
        )
    return devices


def _visible_gpus(pynvml: Any) -> list[Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not visible:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(word)) if word.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(word)
        for word in map(str.strip, visible.split(","))
        if word
    ]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _name(node: dict[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
