"""Stage 2: a workload on a cluster -> a Profile.

Bytes come from a trace under fake tensors, seconds from actors on every device of the cluster: each section class's
forward and backward and the optimizer's step on all ranks at once, as in training, and every collective on every kind
of group. The slowest rank rules. `estimate` works the seconds out instead, for hardware that is not here.
"""

import concurrent.futures
import dataclasses
from typing import TYPE_CHECKING

from osdp_ray.blame import summary
from osdp_ray.errors import WorkloadError
from osdp_ray.modeling import user_code
from osdp_ray.modeling.structure import Structure
from osdp_ray.profiling.compute import measure_compute
from osdp_ray.profiling.estimate import estimate
from osdp_ray.profiling.hooks import measure_hooks, pass_overhead, time_batches
from osdp_ray.profiling.links import measure_copy, measure_links, measure_node_links
from osdp_ray.profiling.optimizer import measure_optimizer
from osdp_ray.profiling.overheads import measure_overheads
from osdp_ray.profiling.slowdown import measure_slowdown
from osdp_ray.profiling.trace import trace
from osdp_ray.records.cluster import Cluster
from osdp_ray.records.profile import ComputeCost, NodeSpeed, OptimizerCost, Profile, start_calibration
from osdp_ray.units import MIB
from osdp_ray.workload import Workload

if TYPE_CHECKING:
    from osdp_ray.profiling.actors import MeasuringGroup

__all__ = ["estimate", "profile", "trace"]

_MICRO_BATCHES = (1, 2, 4, 8)
_LINKS_LIMIT_S, _COMPUTE_LIMIT_S = 12.0, 8.0


def profile(workload: Workload, cluster: Cluster) -> Profile:
    """Traces the workload and measures it on every device of the cluster.

    Raises WorkloadError for what is wrong with the user's own code, TraceError for a model that fake tensors cannot
    run, ClusterError for a node that does not answer. No actor is left behind.
    """
    user_code.rehearse(workload)
    _require_pickle(workload)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        opening = pool.submit(_open, cluster)  # starting processes takes as long as tracing
        try:
            traced = trace(workload, measures_scratch=cluster.device_kind == "cpu")
        except BaseException:
            opening.result().__exit__(None, None, None)
            raise
        group = opening.result()
    try:
        largest_bytes = max(section_class.parameter_bytes for section_class in traced.structure.classes)
        largest_bytes = min(max(largest_bytes, 1 * MIB), 64 * MIB)
        links = measure_links(group, largest_bytes=largest_bytes, limit_s=_LINKS_LIMIT_S)
        node_links = measure_node_links(group)
        context_bytes, communicator_bytes = measure_overheads(group)
        copy_bytes_per_s = measure_copy(group, largest_bytes)
        slowdown_fraction = measure_slowdown(group)
        unit_overheads, root_s = measure_hooks(group, largest_bytes, copy_bytes_per_s)
        batch_s = group.run(time_batches, workload, _MICRO_BATCHES)
        arguments = (workload, traced.structure, _MICRO_BATCHES, cluster.device_kind, _COMPUTE_LIMIT_S)
        compute = group.run(measure_compute, *arguments)
        optimizer = group.run(measure_optimizer, workload)
        clock_offsets_s = group.clock_offsets_s
    finally:
        group.__exit__(None, None, None)
    return Profile(
        workload=workload.name,
        workload_hash=workload.hash(),
        device_kind=cluster.device_kind,
        backend=cluster.backend,
        device_memory_bytes=cluster.smallest_memory_bytes,
        ranks_per_node=cluster.ranks_per_node,
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
        optimizer=_slowest_optimizer(optimizer),
        compute=_slowest_compute(traced.structure, compute),
        links=links,
        copy_bytes_per_s=copy_bytes_per_s,
        calibration=start_calibration(cluster.device_kind),
        overlaps=cluster.backend == "nccl",
        overlap_slowdown_fraction=slowdown_fraction,
        context_bytes=context_bytes,
        communicator_bytes=communicator_bytes,
        unit_overheads=unit_overheads,
        pass_overhead=pass_overhead(root_s, batch_s),
        cluster_hash=cluster.hash(),
        nodes=node_speeds(cluster, traced.structure, compute, node_links, clock_offsets_s),
    )


def node_speeds(
    cluster: Cluster,
    structure: Structure,
    compute: list[list[ComputeCost]],
    links: tuple[float | None, ...],
    clock_offsets_s: tuple[float, ...],
) -> tuple[NodeSpeed, ...]:
    """What every node was measured at: by its slowest rank, its smallest device, its faster link."""
    speeds = []
    for node, link_bytes_per_s in zip(cluster.nodes, links, strict=True):
        ranks = [rank for rank, device in enumerate(cluster.devices) if device.node_id == node.node_id]
        whole_s = [_whole_s(structure, compute[rank], 1) for rank in ranks]
        speeds.append(
            NodeSpeed(
                address=node.address,
                hostname=node.hostname,
                num_ranks=len(ranks),
                memory_bytes=min(cluster.devices[rank].memory_bytes for rank in ranks),
                compute_s=max(whole_s),
                link_bytes_per_s=link_bytes_per_s,
                clock_offset_s=max((clock_offsets_s[rank] for rank in ranks), key=abs),
            )
        )
    return tuple(speeds)


def _require_pickle(workload: Workload) -> None:
    import ray.cloudpickle  # loads ray, which an estimate does without

    try:
        ray.cloudpickle.dumps(workload)
    except Exception as error:  # the border to code that is not ours
        remedy = "Hold settings and paths in it, and open files, locks and the like in its methods."
        raise WorkloadError("state", f"cannot be sent to workers ({summary(error)})", "", remedy) from error


def _open(cluster: Cluster) -> "MeasuringGroup":
    from osdp_ray.profiling.actors import MeasuringGroup  # loads ray, which an estimate does without

    return MeasuringGroup(cluster).__enter__()


def _slowest_compute(structure: Structure, compute: list[list[ComputeCost]]) -> tuple[ComputeCost, ...]:
    """The costs of the rank that takes longest for eight samples: every step waits for it.

    All of one rank's: where ranks share cores, each class is slow on another one, and the slowest of each are of none.
    """
    return tuple(max(compute, key=lambda costs: _whole_s(structure, costs, 8)))


def _whole_s(structure: Structure, costs: list[ComputeCost], micro_batch: int) -> float:
    """Seconds of the whole model's forward and backward."""
    of_section = [costs[section.class_index] for section in structure.sections]
    return sum(cost.forward_s(micro_batch) + cost.backward_s(micro_batch) for cost in of_section)


def _slowest_optimizer(costs: list[OptimizerCost]) -> OptimizerCost:
    names = ("step_s_per_byte", "step_s_per_tensor", "step_constant_s")
    return dataclasses.replace(costs[0], **{name: max(getattr(cost, name) for cost in costs) for name in names})
