"""What real gloo ranks hold, by the sampler of training, agrees with the prediction for gloo: its copies included."""

import dataclasses
import json

import torch
import torch.distributed as dist

from osdp_ray.costs import simulate_bytes
from osdp_ray.observation.allocator import AllocatorPeak
from tests.fake_rank import FakeRank
from tests.memory_cases import available_models, build_case, draw_cases
from tests.ranks import free_port, start_ranks

NUM_CASES, SEED = 3, 0
SAMPLED_STEP = 3
MODELS = ("gpt", "gpt-tied", "gpt-wide", "shared-layers", "bert")
# Autograd's graph differs from a trace's by a node at the border of each unit, as in tests/property/test_memory_cases.
TOLERANCE_FRACTION = 0.005


def run_rank(rank, num_ranks, port, cases, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    peaks = []
    for workload, plan in cases:
        played = FakeRank(workload, plan, "cpu", rank)
        for _ in range(SAMPLED_STEP - 1):
            played.step()
        with AllocatorPeak("cpu").measure(SAMPLED_STEP, played.persistent_bytes) as memory:
            played.step()
        peaks.append(memory.peak_bytes)
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(peaks, file)
    dist.destroy_process_group()


def measured_peaks(cases, out):
    """Peaks of every case, by rank."""
    num_ranks = cases[0].plan.num_ranks
    port = free_port()
    pairs = [(case.workload, case.plan) for case in cases]
    start_ranks(run_rank, (num_ranks, port, pairs, str(out)), num_ranks)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def test_the_peaks_of_gloo_ranks_are_predicted(tmp_path):
    models = [name for name in MODELS if name in available_models()]
    cases = [build_case(draw) for draw in draw_cases(NUM_CASES, SEED, models=models, worlds=((2, 2),))]

    by_rank = measured_peaks(cases, tmp_path)

    for rank, peaks in enumerate(by_rank):
        for case, measured_bytes in zip(cases, peaks, strict=True):
            profile = dataclasses.replace(case.profile, backend="gloo")
            error_bytes = simulate_bytes(profile, case.plan, rank=rank).peak_bytes - measured_bytes
            allowed = 0 if case.draw.is_plain else TOLERANCE_FRACTION * measured_bytes
            assert abs(error_bytes) <= allowed, f"{case.draw.label}: {error_bytes} of {measured_bytes} bytes"
