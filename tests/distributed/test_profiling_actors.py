"""Discovery and link measurement on one real Ray cluster of two nodes, 127.0.0.2 and 127.0.0.3, two ranks on each.

The tests share the cluster and, where they can, one group of actors.
"""

import dataclasses
import os
import sys
import time

import pytest
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster as RayCluster
from ray.util.placement_group import placement_group_table

from osdp_ray.discovery import connect, discover, select_devices
from osdp_ray.errors import ClusterError, UsageError, WorkerError
from osdp_ray.profiling.actors import MeasuringGroup, _summary
from osdp_ray.profiling.links import FREE_BYTES_PER_S, measure_copy, measure_links, measure_node_links
from osdp_ray.profiling.slowdown import measure_slowdown
from osdp_ray.records.cluster import Device
from osdp_ray.units import MIB

ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def ray_cluster():
    if ray.is_initialized():  # an embedded one of an earlier test
        ray.shutdown()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import this file
    node = {"num_cpus": 2, "object_store_memory": 100 * MIB}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = RayCluster(
            initialize_head=True, head_node_args={**node, "node_ip_address": ADDRESSES[0], "include_dashboard": False}
        )
        try:
            cluster.add_node(**node, node_ip_address=ADDRESSES[1])
            ray.init(address=cluster.address, _node_ip_address=ADDRESSES[0], log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def group(ray_cluster):
    with MeasuringGroup(discover()) as started:
        yield started


def whereabouts():
    return {
        "node_id": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
        "rank": dist.get_rank(),
        "num_ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "num_threads": torch.get_num_threads(),
    }


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    dist.barrier()


def refuse():
    raise UsageError("a workload's own error")


def die():
    os._exit(3)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_ended(pids):
    deadline_s = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [pid for pid in pids if is_running(pid)]


def test_discover_lists_the_slots_of_both_nodes_the_drivers_first(ray_cluster):
    connect("127.0.0.9:1", num_workers=4)  # Ray is connected already: the address is not even looked at

    cluster = discover()

    assert [node.address for node in cluster.nodes] == list(ADDRESSES)
    assert cluster.ranks_per_node == (2, 2)
    assert cluster.backend == "gloo"
    assert all(device.memory_bytes > 0 for device in cluster.devices)
    assert discover(num_workers=2).ranks_per_node == (2,)
    assert discover(num_workers=3).ranks_per_node == (2, 1)
    with pytest.raises(ClusterError, match=r"5 workers .* has 4 CPU slots on 2 nodes.*--num-workers 4"):
        discover(num_workers=5)


def test_every_rank_runs_on_the_node_of_its_device_with_one_thread(group):
    found = group.run(whereabouts)

    assert [place["node_id"] for place in found] == [device.node_id for device in group.cluster.devices]
    assert [place["rank"] for place in found] == [0, 1, 2, 3]
    assert len({place["pid"] for place in found}) == 4
    assert {(place["num_ranks"], place["backend"], place["num_threads"]) for place in found} == {(4, "gloo", 1)}
    assert group.one_rank_per_node == (0, 2)
    assert [place["rank"] for place in group.run(whereabouts, ranks=group.one_rank_per_node)] == [0, 2]


def test_every_collective_is_measured_inside_the_nodes_across_them_and_over_the_world(group):
    links = measure_links(group, largest_bytes=4 * MIB, limit_s=2.0)

    assert {(link.group, link.collective) for link in links} == {
        (kind, name) for kind in ("world", "node", "across") for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert len(links) == 9
    for link in links:
        assert link.latency_s >= 0
        assert 0 < link.seconds(4 * MIB) < 60
        assert link.residual_fraction >= 0
    assert 0 < measure_copy(group, 4 * MIB) < FREE_BYTES_PER_S
    assert all(len(link.residuals) >= 3 for link in links)
    assert all(0 < speed < FREE_BYTES_PER_S for speed in measure_node_links(group))
    assert 0 <= measure_slowdown(group) < 1000


def test_errors_name_the_rank_and_the_node_and_no_actor_stays(ray_cluster, capfd):
    cluster = discover()
    remote = dataclasses.replace(cluster, nodes=cluster.nodes[1:], devices=cluster.devices[2:])

    with MeasuringGroup(remote) as group:
        pids = [place["pid"] for place in group.run(whereabouts)]
        with pytest.raises(UsageError, match="a workload's own error"):
            group.run(refuse)
        with pytest.raises(WorkerError, match=r"worker 1 failed: .*fail_on_rank_1.*127\.0\.0\.3.*no luck") as caught:
            group.run(fail_on_rank_1)
        assert caught.value.rank == 1
        assert "in fail_on_rank_1" in caught.value.__notes__[0]
        # Rank 0 now waits for rank 1 in a collective.
        with pytest.raises(
            ClusterError, match=r"127\.0\.0\.3, rank 0\) gave no answer .*whereabouts.* 1 s.*ray status"
        ):
            group.run(whereabouts, ranks=[0], timeout_s=1.0)
        with pytest.raises(ClusterError, match=r"127\.0\.0\.3, rank 1\) was lost while measuring \(die\).*ray status"):
            group.run(die, ranks=[1])

    assert_ended(pids)
    assert "Unhandled error" not in capfd.readouterr().err


def test_a_node_that_is_gone_is_named_when_the_group_starts(ray_cluster):
    cluster = discover(num_workers=1)
    gone = dataclasses.replace(cluster.nodes[0], node_id="ab" * 28, hostname="gone", address="10.9.9.9")
    device = dataclasses.replace(cluster.devices[0], node_id=gone.node_id)
    missing = dataclasses.replace(cluster, nodes=(gone,), devices=(device,))

    lost = r"node gone \(10\.9\.9\.9, rank 0\) was lost while starting.*ray status"
    with pytest.raises(ClusterError, match=lost), MeasuringGroup(missing):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine whose GPUs exist for Ray alone")
def test_gpus_that_ray_has_and_the_machine_has_not_are_errors_that_name_the_node_and_are_given_back(ray_cluster):
    node = ray_cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=100 * MIB, node_ip_address="127.0.0.4")
    try:
        with pytest.raises(ClusterError, match=r"node .* has 2 GPUs for Ray and (NVML|no pynvml).*--num-gpus"):
            discover()

        (raw,) = [raw for raw in ray.nodes() if raw["NodeManagerAddress"] == "127.0.0.4"]
        gpus = {
            raw["NodeID"]: tuple(
                Device(node_id=raw["NodeID"], index=index, kind="cuda", name="", uuid="", memory_bytes=1, free_bytes=1)
                for index in range(2)
            )
        }
        cluster = select_devices([raw], gpus, raw["NodeID"], None)
        # The actors start in their GPUs' bundles, and fail where they first touch CUDA.
        joining = r"127\.0\.0\.4, rank [01]\) failed while joining the process group"
        with pytest.raises(ClusterError, match=joining), MeasuringGroup(cluster):
            pass
        assert ray.available_resources()["GPU"] == 2
        assert {entry["state"] for entry in placement_group_table().values()} == {"REMOVED"}
    finally:
        ray_cluster.remove_node(node)


def test_of_what_ray_says_of_a_lost_actor_the_cause_is_told():
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: A\nIt died because its node has died."
    )
    assert _summary(ray.exceptions.RayError(text)) == "RayError: It died because its node has died"
    assert _summary(ValueError("no luck\nbecause of that")) == "ValueError: no luck"
