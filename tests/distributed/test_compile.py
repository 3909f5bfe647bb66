"""Blocks through torch.compile train like one plain process, within the predicted peak."""

import gc
import itertools

import pytest
import torch
import torch.distributed as dist

from osdp_ray.costs import simulate_bytes
from osdp_ray.execution.apply import parallelize
from osdp_ray.execution.clipping import clip_grad_norm
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.observation import persistent_bytes
from osdp_ray.planning.choices import ZERO3, uniform_sections
from osdp_ray.profiling.trace import trace
from osdp_ray.workloads.gpt import GptWorkload
from tests.oracle import events_of, make_plan, traced_profile

NUM_STEPS, MICRO_BATCH, MAX_NORM = 3, 4, 0.3
RECOMPUTES = ("none", "selective", "full")


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def workload():
    return GptWorkload(layers=2, hidden=32, heads=2, sequence=16, data=__file__, learning_rate=1e-2)


def train(model, clip):
    """(loss, norm) of every step, and the peak of the last one."""
    optimizer = workload().build_optimizer(model.parameters())
    batches = workload().build_batches(0, 1, MICRO_BATCH, 0, 0)
    curve = []

    def step():
        loss = workload().loss(model, next(batches))
        loss.backward()
        norm = clip(list(model.parameters()), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append((loss.item(), norm.item()))

    for _ in range(NUM_STEPS - 1):
        step()
    gc.collect()
    held = persistent_bytes(model, optimizer, ())
    return curve, held + max(itertools.accumulate(events_of(step)))


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_compiled_blocks_keep_numbers_and_peak(recompute):
    plain, initialisation = build_on_meta(workload())
    initialisation.materialize(plain, "cpu", 0)
    wanted, _ = train(plain, torch.nn.utils.clip_grad_norm_)
    profile = traced_profile(workload(), trace(workload()), ranks_per_node=(1,))
    sections = uniform_sections(profile, ZERO3, recompute)
    plan = make_plan(profile, sections, micro_batch=MICRO_BATCH, accumulation=1)
    model, initialisation = build_on_meta(workload())
    initialisation.materialize(parallelize(model, plan, device_type="cpu", compiles=True), "cpu", 0)

    found, peak_bytes = train(model, clip_grad_norm)

    assert list(itertools.chain(*found)) == pytest.approx(list(itertools.chain(*wanted)), rel=1e-5)
    assert peak_bytes <= 1.02 * simulate_bytes(profile, plan, clips=True).peak_bytes
