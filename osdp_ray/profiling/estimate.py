"""A workload on hardware that is not here -> a Profile: bytes from the same trace, seconds worked out, none measured.

Computation is a roofline per operation (Williams, Waterman, Patterson, CACM 52(4), 2009):

    seconds = launch + max(flops / achieved flops per second, bytes / achieved bytes per second)

and a section's forward or backward is the sum over its operations, fitted over micro-batches as measurements are. The
slowest device and link and the smallest memory rule. Links: `ring_link`. The optimizer: `optimizer_cost`.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from osdp_ray.errors import UsageError
from osdp_ray.modeling import user_code
from osdp_ray.profiling.compute import fit_cost
from osdp_ray.profiling.links import COLLECTIVES, free_links, group_members
from osdp_ray.profiling.optimizer import optimizer_bytes
from osdp_ray.profiling.trace import trace
from osdp_ray.profiling.work import SectionWork, Work, operation_bytes
from osdp_ray.records.hardware import DeviceSpec, Hardware, LinkSpec
from osdp_ray.records.profile import (
    Collective,
    ComputeCost,
    GroupKind,
    LinkCost,
    OptimizerCost,
    Profile,
    Recompute,
    start_calibration,
)
from osdp_ray.workload import Workload

_MICRO_BATCHES = (1, 2, 4, 8)  # those that a measured profile is fitted over
_COPY_BYTES_MOVED = 2  # per byte copied: one read, one written
_NUM_ELEMENTS = 1 << 16  # of each parameter that the optimizer is counted on


def estimate(workload: Workload, hardware: Hardware) -> Profile:
    """The profile of a workload on hardware that a cluster file describes.

    Needs neither the hardware nor the model's memory. Raises TraceError, and UsageError where a device has no figure
    for the workload's precision.
    """
    _check_precision(workload, hardware)
    user_code.rehearse(workload)
    traced = trace(workload, counts_work=True, measures_scratch=hardware.device_kind == "cpu")
    slowest_copy = min(device.achieved_bytes_per_s for device in hardware.devices) / _COPY_BYTES_MOVED
    return Profile(
        workload=workload.name,
        workload_hash=workload.hash(),
        device_kind=hardware.device_kind,
        backend=hardware.backend,
        overlaps=hardware.overlaps,
        device_memory_bytes=hardware.smallest_memory_bytes,
        ranks_per_node=hardware.ranks_per_node,
        precision=workload.precision,
        classes=traced.structure.classes,
        sections=traced.structure.sections,
        traces=traced.traces,
        evaluation=traced.evaluation,
        alone=traced.alone,
        alone_evaluation=traced.alone_evaluation,
        batch_bytes_per_sample=traced.batch_bytes_per_sample,
        buffer_bytes=traced.buffer_bytes,
        buffer_scratch_bytes=traced.buffer_scratch_bytes,
        scratch=traced.scratch,
        optimizer=optimizer_cost(workload, hardware),
        compute=compute_costs(traced.work, hardware),
        links=estimate_links(hardware),
        copy_bytes_per_s=slowest_copy,
        calibration=start_calibration(hardware.device_kind),
        context_bytes=max(device.context_bytes for device in hardware.devices),
        communicator_bytes=max(device.communicator_bytes for device in hardware.devices),
    )


def _check_precision(workload: Workload, hardware: Hardware) -> None:
    for device in hardware.devices:
        if workload.precision not in device.peak_flops_per_s:
            known = " or ".join(device.peak_flops_per_s)
            raise UsageError(
                f"{device.name} of cluster {hardware.name!r} has no arithmetic rate for {workload.precision}. "
                f"Use --precision {known}, or give device.peak a rate for {workload.precision}."
            )


# -- computation


def work_seconds(work: Iterable[Work], device: DeviceSpec, micro_batch: int) -> float:
    """Seconds that a device takes for operations, one after the other; see the module's docstring."""
    seconds = 0.0
    for item in work:
        precision = item.precision if item.precision in device.peak_flops_per_s else "fp32"
        arithmetic_s = item.flops(micro_batch) / device.flops_per_s(precision)
        memory_s = item.num_bytes(micro_batch) / device.achieved_bytes_per_s
        seconds += device.launch_s + max(arithmetic_s, memory_s)
    return seconds


def compute_costs(work: tuple[SectionWork, ...], hardware: Hardware) -> tuple[ComputeCost, ...]:
    """One ComputeCost per section class, at every micro-batch that of the slowest device."""
    found = {(item.class_index, item.recompute): item for item in work}
    plain = sorted(index for index, recompute in found if recompute == "none")
    return tuple(_compute_cost(index, found, hardware) for index in plain)


def _compute_cost(class_index: int, found: dict[tuple[int, Recompute], SectionWork], hardware: Hardware) -> ComputeCost:
    plain = found[class_index, "none"]
    selective = found.get((class_index, "selective"), plain)

    def points(work: tuple[Work, ...]) -> list[tuple[int, float]]:
        return [(m, max(work_seconds(work, device, m) for device in hardware.devices)) for m in _MICRO_BATCHES]

    backward = points(plain.backward)
    more = [
        (m, max(0.0, seconds - plain_s))
        for (m, seconds), (_, plain_s) in zip(points(selective.backward), backward, strict=True)
    ]
    return fit_cost(class_index, points(plain.forward), backward, more)


# -- links


def estimate_links(hardware: Hardware) -> tuple[LinkCost, ...]:
    """A LinkCost for each collective on each kind of group that the layout has (see links.group_members).

    A ring over the world crosses each node's border once in and once out, so its bandwidth is the least of a device's
    link and a node's adapters. Groups across nodes are at work together, as many as a node has devices, and share them.
    """
    layout = hardware.ranks_per_node
    if len(layout) == 1 and layout[0] == 1:
        return free_links()
    launch_s = max(device.launch_s for device in hardware.devices)
    num_nodes, per_node = len(layout), max(layout)
    inner, across = _slowest(hardware.inner_links), _slowest((hardware.across,) if hardware.across else ())
    costs = []
    for kind, members in group_members(layout).items():
        num_ranks = len(members[0])
        crossings = {"world": num_nodes - 1, "node": 0, "across": num_nodes - 1}[kind]
        sharing = per_node if kind == "across" else 1
        rates = [inner[0]] if num_ranks - 1 > crossings else []
        rates += [across[0] / sharing] if crossings else []
        for collective in COLLECTIVES:
            costs.append(
                ring_link(
                    kind,
                    collective,
                    num_ranks=num_ranks,
                    bytes_per_s=min(rates),
                    hops_s=(num_ranks - 1 - crossings) * inner[1] + crossings * across[1],
                    launch_s=launch_s,
                )
            )
    return tuple(costs)


def ring_link(
    group: GroupKind,
    collective: Collective,
    *,
    num_ranks: int,
    bytes_per_s: float,
    hops_s: float,
    launch_s: float,
) -> LinkCost:
    """The cost of a collective by the ring algorithm, over links of `bytes_per_s` in each direction.

    With p ranks, n bytes of the whole tensor, and `hops_s` for a message that passes all but one link of the ring:

        all_gather, reduce_scatter   launch + hops + (p - 1) / p * n / bytes_per_s
        all_reduce                   launch + 2 * (hops + (p - 1) / p * n / bytes_per_s)

    (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, sections 4.1 to 4.3; nccl-tests' doc/PERFORMANCE.md has the same
    factors; NCCL's own model, src/graph/tuning.cc, counts p - 1 hops of which nodes - 1 leave a node.) Over gloo the
    reduce-scatter is a ring of our own; see modeling.ring.
    """
    rounds = 2 if collective == "all_reduce" else 1
    return LinkCost(
        group=group,
        collective=collective,
        latency_s=launch_s + rounds * hops_s,
        bytes_per_s=bytes_per_s * num_ranks / (rounds * (num_ranks - 1)),
        residual_fraction=0.0,
    )


def _slowest(links: tuple[LinkSpec, ...]) -> tuple[float, float]:
    """(bytes per second, seconds per hop) of the slowest of several kinds; (infinity, 0) for none."""
    bytes_per_s = min((link.achieved_bytes_per_s for link in links), default=float("inf"))
    return bytes_per_s, max((link.latency_s for link in links), default=0.0)


# -- optimizer


class _OnDevice(Workload):
    """A workload whose optimizer takes the form that it takes on a GPU unless told otherwise: all tensors at once."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def build_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = user_code.build_optimizer(self.workload, parameters)
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer


def optimizer_cost(workload: Workload, hardware: Hardware) -> OptimizerCost:
    """Bytes measured on small parameters here; seconds from the bytes that its operations move, counted on the same.

    Memory binds an optimizer. An operation on single tensors is launched once for each; one on lists of them, fused or
    foreach, serves so many at a time that its launches do not count.
    """
    subject = _OnDevice(workload) if hardware.device_kind == "cuda" else copy.copy(workload)
    moved_per_byte, launches_per_tensor = _count_step(subject)
    return optimizer_bytes(
        subject,
        step_s_per_byte=max(moved_per_byte / device.achieved_bytes_per_s for device in hardware.devices),
        step_s_per_tensor=max(launches_per_tensor * device.launch_s for device in hardware.devices),
        step_constant_s=0.0,
    )


class _StepCounter(TorchDispatchMode):
    """Counts the bytes that operations move, and those operations that take no lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.num_single = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        num_bytes = operation_bytes(function, args, kwargs or {}, result)
        self.num_bytes += num_bytes
        if num_bytes and not any(isinstance(argument, list | tuple) for argument in args):
            self.num_single += 1
        return result


def _count_step(workload: Workload) -> tuple[float, float]:
    """Bytes that a step moves per byte of parameters, and launches per parameter, from one parameter more or less."""
    one, two = (_counted_step(workload, number) for number in (1, 2))
    itemsize = torch.tensor([]).element_size()
    return (two.num_bytes - one.num_bytes) / (_NUM_ELEMENTS * itemsize), two.num_single - one.num_single


def _counted_step(workload: Workload, number: int) -> _StepCounter:
    parameters = [nn.Parameter(torch.zeros(_NUM_ELEMENTS)) for _ in range(number)]
    optimizer = user_code.build_optimizer(workload, parameters)
    counter = _StepCounter()
    for is_first in (True, False):  # the first step makes the state
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if is_first:
            user_code.step(optimizer)
        else:
            with counter:
                user_code.step(optimizer)
    return counter
