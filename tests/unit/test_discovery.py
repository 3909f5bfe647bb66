"""Which devices a run gets, from what Ray says of the nodes. Ray itself is not started here."""

import contextlib
import os
import signal
import socket
import sys
import time

import pytest
import ray

from osdp_ray import discovery
from osdp_ray.discovery import connect, select_devices
from osdp_ray.errors import ClusterError, UsageError
from osdp_ray.records.cluster import Device
from osdp_ray.signals import StopNow, StopSignals
from osdp_ray.units import GIB


def node(name, cpus=0.0, gpus=0.0, memory_bytes=8 * GIB):
    """A node as `ray.nodes()` lists it, reduced to what is read."""
    resources = {"CPU": float(cpus), "GPU": float(gpus), "memory": float(memory_bytes)}
    return {
        "NodeID": name,
        "Alive": True,
        "NodeManagerAddress": f"10.0.0.{ord(name[0])}",
        "NodeManagerHostname": f"host-{name}",
        "Resources": {key: value for key, value in resources.items() if value},
    }


def gpus_of(name, count, model="NVIDIA H100", memory_bytes=80 * GIB):
    return tuple(
        Device(
            node_id=name,
            index=index,
            kind="cuda",
            name=model,
            uuid=f"GPU-{name}{index}",
            memory_bytes=memory_bytes,
            free_bytes=memory_bytes - GIB,
        )
        for index in range(count)
    )


def test_without_gpus_every_cpu_slot_is_a_device_with_an_equal_part_of_its_node():
    cluster = select_devices([node("a", cpus=2), node("b", cpus=4)], {}, "a", None)

    assert cluster.device_kind == "cpu"
    assert cluster.backend == "gloo"
    assert cluster.ranks_per_node == (2, 4)
    assert [device.memory_bytes for device in cluster.devices] == [4 * GIB] * 2 + [2 * GIB] * 4
    assert len({device.uuid for device in cluster.devices}) == 6


def test_memory_is_shared_by_the_devices_that_are_used_and_not_by_all_slots():
    cluster = select_devices([node("a", cpus=8)], {}, "a", 2)

    assert [device.memory_bytes for device in cluster.devices] == [4 * GIB] * 2


def test_the_drivers_node_comes_first_then_the_nodes_with_the_most_devices_then_the_node_id():
    nodes = [node("d", cpus=2), node("c", cpus=4), node("b", cpus=4), node("a", cpus=1)]

    cluster = select_devices(nodes, {}, "a", None)

    assert [n.node_id for n in cluster.nodes] == ["a", "b", "c", "d"]
    assert [device.node_id for device in cluster.devices] == ["a"] + ["b"] * 4 + ["c"] * 4 + ["d"] * 2


def test_fewer_workers_than_devices_are_packed_and_unused_nodes_are_left_out():
    cluster = select_devices([node("a", cpus=2), node("b", cpus=4), node("c", cpus=4)], {}, "a", 4)

    assert cluster.ranks_per_node == (2, 2)
    assert [n.node_id for n in cluster.nodes] == ["a", "b"]
    assert cluster.num_ranks == 4


def test_where_there_are_gpus_only_gpus_are_used_and_models_may_differ():
    nodes = [node("a", cpus=16), node("b", cpus=16, gpus=2), node("c", cpus=16, gpus=1)]
    gpus = {"b": gpus_of("b", 2), "c": gpus_of("c", 1, "NVIDIA L4", 24 * GIB)}

    cluster = select_devices(nodes, gpus, "a", None)

    assert cluster.device_kind == "cuda"
    assert cluster.backend == "nccl"
    assert cluster.ranks_per_node == (2, 1)
    assert cluster.smallest_memory_bytes == 24 * GIB
    assert "NVIDIA H100" in cluster.table()
    assert "NVIDIA L4" in cluster.table()


def test_more_workers_than_devices_is_an_error_with_both_numbers_and_the_flag():
    with pytest.raises(ClusterError, match=r"5 workers .* has 3 CPU slots on 2 nodes.*--num-workers 3"):
        select_devices([node("a", cpus=2), node("b", cpus=1)], {}, "a", 5)
    with pytest.raises(ClusterError, match=r"5 workers .* has 2 GPUs on 1 nodes.*--num-workers 2"):
        select_devices([node("a", cpus=64, gpus=2)], {"a": gpus_of("a", 2)}, "a", 5)


def test_a_cluster_without_slots_and_a_run_without_workers_are_errors():
    with pytest.raises(ClusterError, match=r"neither a GPU nor a CPU slot.*--num-cpus"):
        select_devices([node("a")], {}, "a", None)
    with pytest.raises(UsageError, match="--num-workers 1 or more"):
        select_devices([node("a", cpus=1)], {}, "a", 0)


def test_a_cluster_record_survives_json():
    cluster = select_devices([node("a", cpus=2), node("b", gpus=1)], {"b": gpus_of("b", 1)}, "a", None)

    assert type(cluster).from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("head", "no address of a cluster.*HOST:PORT"),
        ("head:port", "no address of a cluster.*HOST:PORT"),
        ("head:70000", "no address of a cluster.*HOST:PORT"),
        ("http://head:8265", "dashboard.*ray job submit"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_right_form(address, match):
    with pytest.raises(ClusterError, match=match):
        connect(address, num_workers=1)
    assert not ray.is_initialized()


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_listens_is_an_error_with_the_remedy(prefix):
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))
        address = f"{prefix}127.0.0.2:{unused.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"no Ray cluster answers at {address}.*ray start --head"):
            connect(address, num_workers=1)
    assert not ray.is_initialized()


def test_an_address_where_something_else_listens_is_an_error_within_the_time_given(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", 0))
        silent.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.2:{silent.getsockname()[1]}")
        started_s = time.monotonic()
        with pytest.raises(ClusterError, match=r"is no Ray cluster.*ray start --head"):
            connect(None, num_workers=1, timeout_s=1.0)
        assert time.monotonic() - started_s < 30  # the promise, far above what it takes
    assert not ray.is_initialized()


def test_more_workers_than_an_embedded_ray_has_slots_is_refused_before_it_is_started(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("osdp_ray.discovery._has_gpu_driver", lambda: False)
    with pytest.raises(ClusterError, match=r"100000 workers .*--num-workers \d+"):
        connect(None, num_workers=100_000)
    assert not ray.is_initialized()


def retry_for_ever(**_):
    """What `ray.init` does where the cluster is up and no node of it is on this machine."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


def test_a_cluster_that_answers_and_never_lets_in_is_an_error_at_the_time_limit(monkeypatch):
    monkeypatch.setattr("osdp_ray.discovery._probe", lambda *args, **kwargs: None)
    monkeypatch.setattr(ray, "init", retry_for_ever)
    before = signal.getsignal(signal.SIGALRM)

    with pytest.raises(ClusterError, match=r"does not let this process in: no answer in time.*RAY_AUTH_MODE"):
        connect("127.0.0.1:6379", num_workers=1, timeout_s=0.2)

    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_embedded_ray_gets_a_token_of_its_own_unless_the_user_has_set_one(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(ray, "init", lambda **kwargs: started.append(kwargs))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    connect(None, num_workers=1)
    assert "RAY_AUTH_TOKEN" not in os.environ

    monkeypatch.delenv("RAY_AUTH_MODE")
    connect(None, num_workers=1)
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64

    connect(None, num_workers=1)
    assert os.environ["RAY_AUTH_TOKEN"] == token
    assert [kwargs["address"] for kwargs in started] == ["local"] * 3
    monkeypatch.delenv("RAY_AUTH_TOKEN")


def test_a_sigterm_while_ray_starts_is_heard_by_the_callers_handler_not_by_rays(monkeypatch):
    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(9)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a")
    with StopSignals() as signals, pytest.raises(StopNow):
        connect("local", num_workers=1)
    assert signals.received == signal.SIGTERM


def test_the_callers_sigterm_handler_stays_and_without_one_rays_does(monkeypatch):
    def rays(number, frame):
        pass

    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, rays))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a")
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        connect("local", num_workers=1)
        assert signal.getsignal(signal.SIGTERM) == signals._handle
    try:
        assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is before
        connect("local", num_workers=1)
        assert signal.getsignal(signal.SIGTERM) is rays
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_ray_that_starts_too_slowly_is_tried_once_more_and_then_named(monkeypatch, num_failures):
    calls = []

    def init(**settings):
        calls.append(settings)
        if len(calls) <= num_failures:
            raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(discovery.ray, "init", init)
    monkeypatch.setattr(discovery.ray, "shutdown", lambda: None)
    if num_failures == 1:
        discovery._start_embedded(1)
    else:
        with pytest.raises(ClusterError, match=r"Ray did not start .* timed out during startup.* less busy"):
            discovery._start_embedded(1)
    assert len(calls) == 2
