"""What real gloo ranks hold while they build a model and while they resume agrees with the prediction."""

import gc
import itertools
import json
import random

import pytest
import torch
import torch.distributed as dist

from osdp_ray.costs import simulate_bytes
from osdp_ray.execution.apply import parallelize
from osdp_ray.execution.saves import Save, latest_save, load, save
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.observation import persistent_bytes
from osdp_ray.profiling.trace import trace
from osdp_ray.workloads.gpt import GptWorkload
from tests.oracle import events_of, make_plan, random_sections, traced_profile
from tests.ranks import free_port, start_ranks

RANKS_PER_NODE, NUM_PLANS = (2,), 2
TOLERANCE_FRACTION = 0.02


def workload():
    return GptWorkload(layers=8, hidden=256, heads=4, sequence=32, vocabulary=1500, data=__file__)


def highest(action):
    gc.collect()
    return max(0, *itertools.accumulate(events_of(action)))


def build(plan):
    model, initialisation = build_on_meta(workload())
    initialisation.materialize(parallelize(model, plan, device_type="cpu"), "cpu", 0)
    return model, workload().build_optimizer(model.parameters())


def facts():
    nothing = {"seed": 0, "num_steps": 1, "num_ranks": 2, "global_batch": 2, "plan_index": 0}
    return Save(workload="", workload_hash="", step=1, num_samples=2, first_loss=None, final_loss=None, **nothing)


def run_rank(rank, port, plans, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = []
    for number, plan in enumerate(plans):
        model, optimizer = build(plan)
        loss = workload().loss(model, next(workload().build_batches(rank, 2, 1, 0, 0)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        save(f"{out}/{number}", facts(), model, optimizer)
        del model, optimizer, loss
        built = []
        building = highest(lambda plan=plan, built=built: built.extend(build(plan)))
        held = persistent_bytes(*built, ())
        newest = latest_save(f"{out}/{number}")
        loading = held + highest(lambda built=built, newest=newest: load(newest, *built, workload_hash=""))
        found.append({"building": building, "loading": loading})
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def test_the_peaks_of_building_and_resuming_are_predicted(tmp_path):
    profile = traced_profile(workload(), trace(workload()), ranks_per_node=RANKS_PER_NODE)
    plans = [
        make_plan(profile, random_sections(profile, random.Random(seed)), micro_batch=1, accumulation=1)
        for seed in range(NUM_PLANS)
    ]
    port = free_port()

    start_ranks(run_rank, (port, plans, str(tmp_path)), 2)

    for rank in range(2):
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        for plan, peaks in zip(plans, measured, strict=True):
            predicted = simulate_bytes(profile, plan, rank=rank).peak_by_phase
            for phase, peak_bytes in peaks.items():
                assert predicted[phase] == pytest.approx(peak_bytes, rel=TOLERANCE_FRACTION), f"{phase}, rank {rank}"
