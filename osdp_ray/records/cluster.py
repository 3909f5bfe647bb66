"""Cluster: the devices that a run may use, node by node, in rank order."""

import dataclasses
import hashlib
import json
from typing import Literal

from osdp_ray.schema import Record, format_table, record
from osdp_ray.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of the cluster. `node_id` is Ray's."""

    node_id: str
    address: str
    hostname: str
    num_cpus: float
    memory_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What one worker runs on: a GPU, or for CPU workers an equal share of the node.

    `memory_bytes` is all of it, `free_bytes` what was free when it was looked at.
    """

    node_id: str
    index: int
    kind: Literal["cuda", "cpu"]
    name: str
    uuid: str
    memory_bytes: int
    free_bytes: int


@record("cluster", version=1)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster(Record):
    """The devices of a run, one per worker, those of a node side by side, as Ray Train numbers its ranks."""

    nodes: tuple[Node, ...]
    devices: tuple[Device, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        """How many of the devices each node has, in rank order; nodes without one are left out."""
        counts: dict[str, int] = {}
        for device in self.devices:
            counts[device.node_id] = counts.get(device.node_id, 0) + 1
        return tuple(counts.values())

    @property
    def device_kind(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.devices and self.devices[0].kind == "cuda" else "cpu"

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        return "nccl" if self.device_kind == "cuda" else "gloo"

    @property
    def smallest_memory_bytes(self) -> int:
        """The memory of the smallest device, which rules a plan that is the same on every rank."""
        return min(device.memory_bytes for device in self.devices)

    def hash(self) -> str:
        """Identifies the hardware: which devices on which hosts, in rank order. Ray's own numbers, which change with
        every start, and free memory are not in it."""
        hosts = {node.node_id: (node.hostname, node.address, node.num_cpus) for node in self.nodes}
        facts = [(*hosts[device.node_id], device.kind, device.index, device.name) for device in self.devices]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def table(self) -> str:
        """The cluster for a terminal, a line per device."""
        nodes = {node.node_id: node for node in self.nodes}
        rows = [
            (
                str(rank),
                nodes[device.node_id].hostname,
                nodes[device.node_id].address,
                f"{device.kind}:{device.index}",
                device.name,
                format_bytes(device.memory_bytes),
                format_bytes(device.free_bytes),
            )
            for rank, device in enumerate(self.devices)
        ]
        return format_table(("rank", "node", "address", "device", "name", "memory", "free"), rows)
