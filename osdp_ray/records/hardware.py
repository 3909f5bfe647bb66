"""Hardware: what a cluster file says of devices and links, so that a profile can be worked out where they are not.

Rates are peaks as vendors publish them; each stands beside the fraction of it that programs achieve. A link's
bandwidth is that of one direction.
"""

import dataclasses
from typing import Literal

from osdp_ray.records.profile import DeviceKind, Precision

Backend = Literal["nccl", "gloo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One kind of device. `peak_flops_per_s` and `achieved_fraction` have a figure for each precision it computes in.

    `launch_s` is what every kernel takes beside its work: 0 for a CPU. `context_bytes` and `communicator_bytes` are
    what a process holds of it beside tensors (see Profile).
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    memory_achieved_fraction: float
    peak_flops_per_s: dict[Precision, float]
    achieved_fraction: dict[Precision, float]
    launch_s: float
    context_bytes: int = 0
    communicator_bytes: int = 0
    source: str = ""

    def flops_per_s(self, precision: Precision) -> float:
        """What matrix products achieve; `precision` is one that the device has."""
        return self.peak_flops_per_s[precision] * self.achieved_fraction[precision]

    @property
    def achieved_bytes_per_s(self) -> float:
        """What operations bound by memory achieve."""
        return self.memory_bytes_per_s * self.memory_achieved_fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A link. Inside a node: of one device to the others. Across nodes: of one node, all its adapters together."""

    bytes_per_s: float
    achieved_fraction: float
    latency_s: float
    source: str = ""

    @property
    def achieved_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.achieved_fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """`num_nodes` nodes that are alike. `link` is None where a node has one device."""

    num_nodes: int
    devices_per_node: int
    device: DeviceSpec
    link: LinkSpec | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster. `across` is None where it has one node. `overlaps`: communication runs beside computation."""

    name: str
    backend: Backend
    overlaps: bool
    groups: tuple[NodeGroup, ...]
    across: LinkSpec | None
    source: str = ""

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        return tuple(group.devices_per_node for group in self.groups for _ in range(group.num_nodes))

    @property
    def device_kind(self) -> DeviceKind:
        return self.groups[0].device.kind

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """The kinds of devices, each once."""
        return tuple(group.device for group in self.groups)

    @property
    def smallest_memory_bytes(self) -> int:
        """The memory of the smallest device, which rules a plan that is the same on every rank."""
        return min(device.memory_bytes for device in self.devices)

    @property
    def inner_links(self) -> tuple[LinkSpec, ...]:
        """The links inside nodes of several devices."""
        return tuple(group.link for group in self.groups if group.link is not None)
