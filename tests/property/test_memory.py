"""The step simulator agrees with the CPU allocator to the byte, for uniform plans and for arbitrary mixtures.

The truth comes from `tests.oracle`: the executor's own step as rank 0 of a fake world, and the allocator's events.
"""

import functools
import itertools
import random

import pytest
import torch

from osdp_ray.costs import explain_peaks, simulate_bytes
from osdp_ray.costs.steps import clipping_bytes
from osdp_ray.execution.clipping import clip_grad_norm
from osdp_ray.modeling.materialize import build_bare
from osdp_ray.profiling.trace import trace
from osdp_ray.workloads.gpt import GptWorkload
from tests.oracle import UNIFORM_CHOICES, events_of, make_plan, measure, random_sections, traced_profile, uniform_plan

NUM_SEEDS = 10
WORLDS = ((2,), (3,), (4,), (8,), (2, 2), (4, 4))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_bytes(bytes(range(256)) * 64)
    return str(path)


@functools.cache
def workload_and_trace(data, layers, *, tied, precision="fp32"):
    workload = GptWorkload(layers=layers, hidden=64, heads=2, sequence=32, data=data, tied=tied)
    workload.precision = precision
    return workload, trace(workload)


def explain(plan, simulated, truth):
    """What a failure shows: the difference, the phases and the decisions."""
    sections = [
        (section.name, section.recompute, [(unit.choice.label, unit.operators) for unit in section.units])
        for section in plan.sections
    ]
    return (
        f"{simulated.peak_bytes - truth.peak_bytes} bytes off {truth.peak_bytes}; {simulated.peak_by_phase}; "
        f"{plan.num_ranks} ranks, micro-batch {plan.micro_batch}, accumulation {plan.accumulation}; {sections}"
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", UNIFORM_CHOICES)
def test_the_peak_of_a_uniform_plan_is_exact(corpus, name, recompute):
    num_ranks = 4 if recompute == "selective" else 8
    workload, traced = workload_and_trace(corpus, 3, tied=False)
    profile = traced_profile(workload, traced, ranks_per_node=(num_ranks,))
    plan = uniform_plan(profile, name, recompute, micro_batch=4, accumulation=1 + (num_ranks == 4))

    simulated, truth = simulate_bytes(profile, plan), measure(workload, plan)

    assert truth.left_bytes == 0, "the allocator's events are not complete"
    assert simulated.persistent_bytes == truth.persistent_bytes
    assert simulated.peak_bytes == truth.peak_bytes, explain(plan, simulated, truth)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_peak_of_any_mixture_of_decisions_is_exact(corpus, seed):
    rng = random.Random(seed)
    layers, tied, precision = rng.randint(1, 5), rng.random() < 0.2, rng.choice(("fp32", "fp32", "bf16"))
    workload, traced = workload_and_trace(corpus, layers, tied=tied, precision=precision)
    profile = traced_profile(workload, traced, ranks_per_node=rng.choice(WORLDS))
    plan = make_plan(
        profile,
        random_sections(profile, rng),
        micro_batch=rng.randint(1, 8),
        accumulation=rng.randint(1, 4),
        synchronise=rng.choice(("every", "last")),
        prefetch=rng.choice((0, 1, 2, 3)),
    )

    simulated, truth = simulate_bytes(profile, plan), measure(workload, plan)

    assert truth.left_bytes == 0, "the allocator's events are not complete"
    assert simulated.persistent_bytes == truth.persistent_bytes
    assert simulated.peak_bytes == truth.peak_bytes, explain(plan, simulated, truth)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("synchronise", ["every", "last"])
def test_large_gradients_of_replicated_units_are_reduced_where_they_are(corpus, precision, synchronise):
    workload = GptWorkload(layers=1, hidden=512, heads=2, sequence=8, data=corpus)
    workload.precision = precision
    profile = traced_profile(workload, trace(workload), ranks_per_node=(4,))
    for number, accumulation in ((0, 1), (1, 3), (2, 2)):
        sections = uniform_plan(profile, "DP", "none", micro_batch=1).sections if number == 0 else None
        plan = make_plan(
            profile,
            sections or random_sections(profile, random.Random(number)),
            micro_batch=1,
            accumulation=accumulation,
            synchronise=synchronise,
        )

        simulated, truth = simulate_bytes(profile, plan), measure(workload, plan)

        assert simulated.persistent_bytes == truth.persistent_bytes
        assert simulated.peak_bytes == truth.peak_bytes, explain(plan, simulated, truth)


@pytest.mark.parametrize("num_tensors", [1, 2, 7, 50])
def test_clipping_holds_the_norms_of_gradients(corpus, num_tensors):
    parameters = [torch.nn.Parameter(torch.ones(10)) for _ in range(num_tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones(10)
    clip_grad_norm(parameters, 1.0)

    events = events_of(lambda: clip_grad_norm(parameters, 1.0))

    assert max(itertools.accumulate(events)) == clipping_bytes(num_tensors)


def test_the_optimizer_phase_of_a_run_that_clips_holds_that_on_top(corpus):
    workload, traced = workload_and_trace(corpus, 3, tied=False)
    profile = traced_profile(workload, traced, ranks_per_node=(8,))
    plan = uniform_plan(profile, "DP", "full", micro_batch=1)

    plain, clipped = (simulate_bytes(profile, plan, clips=clips).peak_by_phase for clips in (False, True))

    num_tensors = len([*build_bare(workload).parameters()])
    assert clipped == plain | {"optimizer": plain["optimizer"] + clipping_bytes(num_tensors)}


@pytest.mark.parametrize("seed", range(3))
def test_the_holders_of_a_peak_add_up_to_it(corpus, seed):
    rng = random.Random(seed)
    workload, traced = workload_and_trace(corpus, 3, tied=False)
    profile = traced_profile(workload, traced, ranks_per_node=(4,))
    plan = make_plan(profile, random_sections(profile, rng), micro_batch=4, accumulation=2)

    peaks = explain_peaks(profile, plan)

    assert {peak.phase: peak.peak_bytes for peak in peaks} == simulate_bytes(profile, plan).peak_by_phase
    for peak in peaks:
        held = sum(holding.num_bytes for holding in peak.holdings)
        assert held == pytest.approx(peak.peak_bytes, abs=16)
        assert peak.holdings == tuple(sorted(peak.holdings, key=lambda holding: -holding.num_bytes))
