"""What runs inside the test bed's first node for tests/distributed/test_testbed.py: `python bed_driver.py WHAT`.

Prints one line of JSON at the end: what was found, or the error and how long it took.
"""

import json
import sys
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from osdp_ray.discovery import connect, discover
from osdp_ray.errors import OsdpError
from osdp_ray.modeling.ring import RingReduceScatter
from osdp_ray.profiling import profile
from osdp_ray.profiling.actors import MeasuringGroup
from osdp_ray.workloads.gpt import GptWorkload

NUMEL = 3 << 20


def interface_bytes():
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


def sent_by_collectives():
    """Bytes that leave this rank's node for a gather, gloo's own scatter and the ring's, and how far the two differ."""
    rank, num_ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    shard, own, ring = (torch.empty(NUMEL // num_ranks) for _ in range(3))
    sent = {}
    for name, call in (
        ("warm", lambda: dist.all_reduce(torch.ones(1 << 16))),
        ("gather", lambda: dist.all_gather_single(torch.empty(NUMEL), shard, group=group)),
        ("own", lambda: dist.reduce_scatter_single(own, whole.clone(), op=dist.ReduceOp.AVG, group=group)),
        ("ring", lambda: RingReduceScatter()(ring, whole.clone(), group, dist.ReduceOp.AVG)),
    ):
        dist.barrier()
        before = interface_bytes()
        call()
        dist.barrier()
        sent[name] = interface_bytes() - before
    return sent, float((own - ring).abs().max())


def sleep(seconds):
    time.sleep(seconds)


def run(what, argument):
    if what == "addresses":
        return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    if what == "profile":
        made = profile(GptWorkload(layers=2, hidden=128, heads=2, sequence=64), discover())
        Path(argument).write_text(json.dumps(made.to_json()))
        return {"slow": made.slow_nodes(), "table": made.table()}
    with MeasuringGroup(discover()) as group:
        if what == "start":
            return group.cluster.num_ranks
        if what == "bytes":
            return group.run(sent_by_collectives)
        Path(argument).touch()
        group.run(sleep, 90.0)
    return "slept"


def main():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    connect(None, num_workers=None)
    began_s = time.monotonic()
    try:
        found = {"found": run(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")}
    except OsdpError as error:
        found = {"error": str(error)}
    print(json.dumps({**found, "seconds": time.monotonic() - began_s}))


if __name__ == "__main__":
    main()
