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
from osdp_ray.profiling.compute import measure_compute
from osdp_ray.profiling.estimate import estimate
from osdp_ray.profiling.links import measure_copy, measure_links
from osdp_ray.profiling.optimizer import measure_optimizer
from osdp_ray.profiling.overheads import measure_overheads
from osdp_ray.profiling.trace import trace
from osdp_ray.records.cluster import Cluster
from osdp_ray.records.profile import ComputeCost, OptimizerCost, Profile, start_calibration
from osdp_ray.units import MIB
from osdp_ray.workload import Workload

if TYPE_CHECKING:
    from osdp_ray.profiling.actors import MeasuringGroup

__all__ = ["estimate", "profile", "trace"]

_MICRO_BATCHES = (1, 2, 4, 8)
_COMPUTE_LIMIT_S = 5.0


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
            traced = trace(workload)
        except BaseException:
            opening.result().__exit__(None, None, None)
            raise
        group = opening.result()
    try:
        largest_bytes = max(section_class.parameter_bytes for section_class in traced.structure.classes)
        links = measure_links(group, largest_bytes=min(max(largest_bytes, 4 * MIB), 64 * MIB))
        context_bytes, communicator_bytes = measure_overheads(group)
        copy_bytes_per_s = measure_copy(group)
        arguments = (workload, traced.structure, _MICRO_BATCHES, cluster.device_kind, _COMPUTE_LIMIT_S)
        compute = group.run(measure_compute, *arguments)
        optimizer = group.run(measure_optimizer, workload)
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
        batch_bytes_per_sample=traced.batch_bytes_per_sample,
        buffer_bytes=traced.buffer_bytes,
        buffer_scratch_bytes=traced.buffer_scratch_bytes,
        optimizer=_slowest_optimizer(optimizer),
        compute=tuple(_slowest_compute(costs) for costs in zip(*compute, strict=True)),
        links=links,
        copy_bytes_per_s=copy_bytes_per_s,
        calibration=start_calibration(cluster.device_kind),
        overlaps=cluster.backend == "nccl",
        context_bytes=context_bytes,
        communicator_bytes=communicator_bytes,
    )


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


def _slowest_compute(costs: tuple[ComputeCost, ...]) -> ComputeCost:
    """The cost of the rank that takes longest for eight samples: every step waits for it."""
    return max(costs, key=lambda cost: cost.forward_s(8) + cost.backward_s(8))


def _slowest_optimizer(costs: list[OptimizerCost]) -> OptimizerCost:
    slowest = max(costs, key=lambda cost: cost.step_s_per_byte)
    return dataclasses.replace(slowest, step_s_per_tensor=max(cost.step_s_per_tensor for cost in costs))
