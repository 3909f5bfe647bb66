"""The step simulator agrees with the CPU allocator for models as they come, to the byte where the plan is uniform.

The truth comes from `tests.oracle`. `SLACK_FRACTION` names what is left, and why.
"""

import functools
import random

import pytest

from osdp_ray.costs import simulate_bytes
from osdp_ray.profiling.trace import trace
from tests.models import HF, ZOO
from tests.oracle import make_plan, measure, random_sections, traced_profile, uniform_plan
from tests.property.test_memory import explain

RANKS = 4
# Under by the copies that oneDNN makes of a convolution's weights, inputs and outputs in its own layout.
SLACK_FRACTION = {"conv-net": 0.08}
# A unit at an operator adds a node to autograd's graph, which moves some additions of gradients; numbers that
# recomputation keeps; see the docstring of profiling.recorder.
MIXED_SLACK_FRACTION = 0.05


@functools.cache
def workload_and_trace(name):
    if name in HF:
        pytest.importorskip("transformers")
    workload = ZOO[name]()
    return workload, trace(workload)


def check(name, plan, profile, workload, slack_fraction):
    simulated, truth = simulate_bytes(profile, plan), measure(workload, plan)
    assert truth.left_bytes == 0, "the allocator's events are not complete"
    assert simulated.persistent_bytes == truth.persistent_bytes
    allowed_bytes = slack_fraction * truth.peak_bytes
    assert abs(simulated.peak_bytes - truth.peak_bytes) <= allowed_bytes, explain(plan, simulated, truth)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize("name", ZOO)
def test_the_peak_of_a_uniform_plan_of_any_model_is_exact(name):
    workload, traced = workload_and_trace(name)
    profile = traced_profile(workload, traced, ranks_per_node=(RANKS,))
    for choice, recompute in (("DP", "none"), ("ZeRO-3", "none"), ("ZeRO-2", "full")):
        # Where blocks are recomputed, numbers and ties of a few bytes to one activation may move.
        slack_fraction = SLACK_FRACTION.get(name, 0.0 if recompute == "none" else 0.006)
        check(name, uniform_plan(profile, choice, recompute, micro_batch=2), profile, workload, slack_fraction)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize("name", ZOO)
def test_the_peak_of_a_mixture_of_decisions_of_any_model_is_close(name):
    workload, traced = workload_and_trace(name)
    rng = random.Random(name)
    profile = traced_profile(workload, traced, ranks_per_node=rng.choice(((2,), (3,), (8,), (2, 2))))
    plan = make_plan(profile, random_sections(profile, rng), micro_batch=rng.randint(2, 5), accumulation=1)
    check(name, plan, profile, workload, SLACK_FRACTION.get(name, MIXED_SLACK_FRACTION))
