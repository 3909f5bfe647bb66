"""Bytes of models whose values decide what runs, traced with real tensors, and of parameters that no loss reaches."""

import pytest
import torch
from torch import nn

from osdp_ray.costs import simulate_bytes
from osdp_ray.profiling.trace import trace
from tests.memory_cases import MODELS
from tests.models import WIDTH, Built, Layer, Stack
from tests.oracle import measure, traced_profile, uniform_plan


class Unused(Layer):
    def forward(self, x):
        return x * 2


class HalfUsed(Layer):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Reading(Layer):
    def forward(self, x):
        return super().forward(x) if x.square().sum().item() > 0 else x


class Choosing(Layer):
    """Half of the tokens or so go through the layer, which ones depends on them."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = (flat.sum(-1) > 0).nonzero().squeeze(-1)
        return flat.index_add(0, chosen, super().forward(flat[chosen])).view_as(x)


class Leaving(Layer):
    def forward(self, x):
        return super().forward(x) + torch.from_numpy(x.detach().numpy())


@torch.library.custom_op("osdp_memory_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_autograd(lambda ctx, gradient: gradient * 2)


class Custom(Layer):
    def forward(self, x):
        return super().forward(double(x))


def difference(workload, name, recompute, accumulation=1):
    """Predicted minus measured peak, and the measured one, of one rank of four."""
    profile = traced_profile(workload, trace(workload), ranks_per_node=(4,))
    plan = uniform_plan(profile, name, recompute, micro_batch=4, accumulation=accumulation)
    truth = measure(workload, plan)
    return simulate_bytes(profile, plan).peak_bytes - truth.peak_bytes, truth.peak_bytes


@pytest.mark.parametrize(
    ("layer", "name", "recompute", "accumulation"),
    [
        (Unused, "ZeRO-3", "none", 2),
        (Unused, "DP", "full", 1),
        (HalfUsed, "ZeRO-2", "full", 2),
    ],
)
def test_parameters_that_no_loss_reaches_hold_neither_gradient_nor_state(layer, name, recompute, accumulation):
    workload = Built(lambda: Stack([Layer(), layer(), layer(), layer(), Layer()]))
    assert difference(workload, name, recompute, accumulation)[0] == 0


@pytest.mark.parametrize("name", ["gpt-tied", "two-streams"])
def test_real_tensors_give_the_trace_of_fake_ones(name):
    workload = MODELS[name]()
    fake = trace(workload)
    workload.measure = True
    assert trace(workload) == fake


@pytest.mark.parametrize(("layer", "recompute"), [(Reading, "full"), (Leaving, "none"), (Custom, "full")])
def test_what_fake_tensors_cannot_run_is_exact_by_real_ones(layer, recompute):
    workload = Built(lambda: Stack([Layer(), layer(), layer(), Layer()]))
    workload.measure = True
    assert difference(workload, "ZeRO-3", recompute)[0] == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shapes_that_depend_on_values_are_sampled(recompute):
    workload = Built(lambda: Stack([Layer(), Choosing(), Choosing(), Layer()]))
    workload.measure = True
    error_bytes, truth_bytes = difference(workload, "ZeRO-3", recompute)
    assert abs(error_bytes) < 0.1 * truth_bytes
