"""One rank of a world of any size in one process, on a CPU or a GPU: the executor's own step over a fake process group,
whose collectives allocate nothing and return at once. In goes a workload and a plan, out come the bytes of a step.

A process should play one rank only: torch keeps what it worked out for it.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from osdp_ray.costs.units import GRANULE_BYTES
from osdp_ray.execution.apply import free_gathered, parallelize
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.observation.allocator import AllocatorPeak
from osdp_ray.records.plan import Plan
from osdp_ray.workload import Workload

DeviceKind = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPeak:
    """What one step held. `reserved_bytes` is None on a CPU.

    `persistent_bytes` are the storages of parameters, buffers and optimizer state as the allocator rounds them;
    `other_bytes` what else it held when the step began, such as cuBLAS's workspaces (0 on a CPU, where only tensors
    that the step makes are counted on top). `peak_bytes` is without them.
    """

    persistent_bytes: int
    other_bytes: int
    peak_bytes: int
    reserved_bytes: int | None


class FakeRank:
    """A model under its plan with its optimizer and batches; see `fake_rank`."""

    def __init__(self, workload: Workload, plan: Plan, device_kind: DeviceKind, rank: int) -> None:
        self.workload, self.plan = workload, plan
        self.device = torch.device(device_kind)
        self.model, initialisation = build_on_meta(workload)
        parallelize(self.model, plan, device_type=device_kind)
        initialisation.materialize(self.model, self.device, 0)
        self.optimizer = workload.build_optimizer(self.model.parameters())
        # Drawn before any step: what a loader makes and holds is not the step's.
        batches = workload.build_batches(rank, plan.num_ranks, plan.micro_batch, 0, 0)
        self._batches = [next(batches) for _ in range(plan.accumulation)]
        self.model._get_fsdp_state()._lazy_init()  # torch 2.13: pads the shards, as the first forward does otherwise

    def step(self) -> None:
        """One optimizer step, with the references that a worker holds and drops; every step has the same batches."""
        for number, drawn in enumerate(self._batches, 1):
            if self.plan.synchronise == "last":
                self.model.set_requires_gradient_sync(number == self.plan.accumulation)
            batch = tree_map(self._copy, drawn)
            loss = self.workload.loss(self.model, batch)
            (loss / self.plan.accumulation).backward()
            del loss, batch
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> None:
        """Two batches without gradients, as a worker evaluates between steps."""
        self.model.eval()
        with torch.no_grad():
            for drawn in (self._batches[0], self._batches[0]):
                batch = tree_map(self._copy, drawn)
                loss = self.workload.loss(self.model, batch)
                del loss, batch
                free_gathered(self.model)
        self.model.train()

    def _copy(self, leaf: Any) -> Any:
        return leaf.to(self.device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    def persistent_bytes(self, rounding_bytes: int = 1) -> int:
        """Bytes of the storages that stay between steps, each rounded up as the allocator does."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in local}  # torch 2.13
        return sum(
            -(-storage.nbytes() // rounding_bytes) * rounding_bytes
            for storage in storages.values()
            if storage.device.type == self.device.type
        )


@contextlib.contextmanager
def fake_rank(workload: Workload, plan: Plan, device_kind: DeviceKind = "cpu", *, rank: int = 0) -> Iterator[FakeRank]:
    """One of the plan's ranks, on the first device of its kind, while the context is open."""
    gc.collect()
    gc.freeze()  # collections within the context look only at what it made
    dist.init_process_group("fake", rank=rank, world_size=plan.num_ranks, store=FakeStore())
    try:
        yield FakeRank(workload, plan, device_kind, rank)
    finally:
        dist.destroy_process_group()
        gc.unfreeze()


def measure_second_step(workload: Workload, plan: Plan, device_kind: DeviceKind) -> StepPeak:
    """The peak of the second step (the first one makes the optimizer's state), by the project's own sampler."""
    with fake_rank(workload, plan, device_kind) as rank:
        rank.step()
        gc.collect()
        persistent_bytes = rank.persistent_bytes(GRANULE_BYTES[device_kind])
        start_bytes = torch.cuda.memory_allocated() if device_kind == "cuda" else persistent_bytes
        with AllocatorPeak(device_kind).measure(2, lambda: persistent_bytes) as memory:
            rank.step()
    if memory.peak_bytes is None:
        raise RuntimeError("the sampler did not measure the second step")
    other_bytes = start_bytes - persistent_bytes
    return StepPeak(
        persistent_bytes=persistent_bytes,
        other_bytes=other_bytes,
        peak_bytes=memory.peak_bytes - other_bytes,
        reserved_bytes=memory.reserved_bytes,
    )
