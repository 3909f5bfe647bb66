"""What a rank holds before its first step is predicted: the allocator's events while models are built are the truth."""

import gc
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from osdp_ray.costs import explain_peaks, simulate_bytes
from osdp_ray.execution.apply import parallelize
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.planning.choices import uniform_sections
from osdp_ray.profiling.trace import trace
from tests.memory_cases import available_models, workload_and_trace
from tests.models import VALUES, WIDTH, Built, Layer, Stack
from tests.oracle import UNIFORM_CHOICES, events_of, make_plan, random_sections, traced_profile

TOLERANCE_FRACTION = 0.02


def build(workload, plan):
    """A model under a plan, as a worker builds it, and the highest level on the way."""
    built = []
    gc.collect()  # a model before this one would be freed within it

    def act():
        model, initialisation = build_on_meta(workload)
        initialisation.materialize(parallelize(model, plan, device_type="cpu"), "cpu", 0)
        built.append(model)

    dist.init_process_group("fake", rank=0, world_size=plan.num_ranks, store=FakeStore())
    try:
        return max(itertools.accumulate(events_of(act))), built[0]
    finally:
        dist.destroy_process_group()


def plans_of(workload, traced, rng, worlds):
    for ranks_per_node in worlds:
        profile = traced_profile(workload, traced, ranks_per_node=ranks_per_node)
        for sections in (random_sections(profile, rng), uniform_sections(profile, UNIFORM_CHOICES["ZeRO-3"], "none")):
            yield profile, make_plan(profile, sections, micro_batch=1, accumulation=1)


@pytest.mark.parametrize(("index", "name"), list(enumerate(available_models())))
def test_the_peak_of_building_any_model_is_predicted(index, name):
    workload, traced = workload_and_trace(name, "fp32")
    profile = traced_profile(workload, traced, ranks_per_node=((2,), (2, 2), (3,), (64,))[index % 4])
    plan = make_plan(profile, random_sections(profile, random.Random(name)), micro_batch=1, accumulation=1)

    predicted_bytes = simulate_bytes(profile, plan).peak_by_phase["building"]

    assert predicted_bytes == pytest.approx(build(workload, plan)[0], rel=TOLERANCE_FRACTION)


class Huge(Stack):
    """An embedding of many chunks."""

    def __init__(self):
        super().__init__([Layer() for _ in range(2)])
        self.table = nn.Embedding(40_001, WIDTH)


class Copied(Stack):
    """Weights that are orthogonal, weights that are copied from others, and a buffer that is worked out."""

    def __init__(self):
        super().__init__([Layer(256) for _ in range(2)])
        self.table = nn.Embedding(5_000, WIDTH)
        nn.init.orthogonal_(self.layers[0].up.weight)
        with torch.no_grad():
            self.layers[1].up.weight.copy_(2 * self.layers[0].down.weight.t())
            self.table.weight.copy_(torch.randn(5_000, WIDTH).clamp(-1, 1))
        self.register_buffer("mask", torch.tril(torch.ones(300, 300)))


@pytest.mark.parametrize("model", [Huge, Copied])
def test_the_peak_of_building_counts_values_that_are_drawn_beside_shards(model):
    workload = Built(model)
    traced = trace(workload)
    for profile, plan in plans_of(workload, traced, random.Random(0), ((2,), (2, 2), (64,))):
        predicted_bytes = simulate_bytes(profile, plan).peak_by_phase["building"]
        truth_bytes, built = build(workload, plan)
        assert predicted_bytes == pytest.approx(truth_bytes, rel=TOLERANCE_FRACTION)
        held = sum(p.to_local().nbytes for p in built.parameters()) + sum(b.nbytes for b in built.buffers())
        if model is Huge:
            assert truth_bytes <= held + 1.1 * 2**20, "no more than a chunk is beside what stays"
        building = explain_peaks(profile, plan)[0]
        assert (building.phase, building.peak_bytes) == ("building", predicted_bytes)


def test_a_shard_holds_the_rows_of_the_whole_that_one_process_draws():
    workload = Built(Huge)
    whole, initialisation = build_on_meta(workload)
    initialisation.materialize(whole, "cpu", 0)
    profile = traced_profile(workload, trace(workload), ranks_per_node=(3,))
    sections = uniform_sections(profile, UNIFORM_CHOICES["ZeRO-3"], "none")

    _, built = build(workload, make_plan(profile, sections, micro_batch=1, accumulation=1))

    for name, parameter in built.named_parameters():
        local = parameter.to_local()
        assert torch.equal(local, whole.get_parameter(name)[: len(local)]), name
    assert len(built.table.weight.to_local()) == 13_334
    assert whole.table.weight.std().item() == pytest.approx(1, abs=0.01)
    assert VALUES < 40_001
