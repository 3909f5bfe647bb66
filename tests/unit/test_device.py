"""What a device holds beside tensors: measured, predicted, kept out of the budget, learned from telemetry."""

import dataclasses
import math

import pytest
import torch

from osdp_ray.costs import held_beside, predict, tensor_budget_bytes
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning import plan
from osdp_ray.profiling import overheads
from osdp_ray.records.profile import RESERVED_START_FRACTION, start_calibration
from osdp_ray.records.telemetry import Telemetry
from osdp_ray.replanning import drifted, recalibrate
from osdp_ray.units import MIB
from tests.random_profiles import base_profile
from tests.unit.test_replanning import sample

BUDGET_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def bare():
    return base_profile()


@pytest.fixture(scope="module")
def burdened(bare):
    """The same model on a device with 3 MiB of context, 1 MiB of communicators, and an allocator that reserves more."""
    return dataclasses.replace(
        bare,
        context_bytes=3 * MIB,
        communicator_bytes=MIB,
        calibration=dataclasses.replace(bare.calibration, reserved_fraction=0.25),
    )


def made(profile, budget_bytes=BUDGET_BYTES):
    return plan(profile, budget_bytes=budget_bytes, global_batch=16, micro_batch=4)


def test_a_cpu_holds_nothing_beside_tensors(bare):
    prediction = made(bare).prediction
    assert prediction.held_beside == {}
    assert prediction.device_bytes == prediction.peak_bytes
    assert tensor_budget_bytes(bare, BUDGET_BYTES) == BUDGET_BYTES
    assert "on the device" not in made(bare).table()


def test_the_lines_beside_tensors_are_of_the_budget(bare, burdened):
    prediction = made(burdened).prediction
    assert prediction.held_beside == {
        "allocator": math.ceil(prediction.peak_bytes * 0.25),
        "context": 3 * MIB,
        "communicators": MIB,
    }
    assert prediction.device_bytes <= BUDGET_BYTES
    assert tensor_budget_bytes(burdened, BUDGET_BYTES) == int((BUDGET_BYTES - 4 * MIB) / 1.25)
    assert made(burdened).sections == made(bare, tensor_budget_bytes(burdened, BUDGET_BYTES)).sections
    assert predict(burdened, made(burdened)) == prediction
    assert "context 3.00 MiB, communicators 1.00 MiB" in made(burdened).table()


def test_a_budget_that_the_lines_alone_fill_names_one_that_holds_them_too(burdened):
    with pytest.raises(InfeasibleError) as caught:
        made(burdened, 4 * MIB)
    smallest_bytes = caught.value.leanest_bytes
    assert smallest_bytes - 4 * MIB == pytest.approx(1.25 * made(burdened, smallest_bytes).prediction.peak_bytes, abs=2)


def test_what_was_reserved_replaces_the_assumption_and_counts_against_the_budget(burdened):
    running = made(burdened)
    peak_bytes = running.prediction.peak_bytes

    def telemetry(reserved_bytes):
        return Telemetry(samples=(sample(0, 3, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes),))

    assert drifted(running, telemetry(BUDGET_BYTES - 4 * MIB)) is None
    assert drifted(running, telemetry(BUDGET_BYTES - 4 * MIB + 1)).kind == "over_budget"
    learned = recalibrate(burdened, running, telemetry(peak_bytes * 2))
    assert learned.calibration.reserved_fraction == pytest.approx(1.0)
    assert held_beside(learned, peak_bytes)["allocator"] == peak_bytes


def test_only_a_gpu_starts_with_a_reserve():
    assert start_calibration("cpu").reserved_fraction == 0.0
    assert start_calibration("cuda").reserved_fraction == RESERVED_START_FRACTION


def test_the_context_is_what_the_driver_counts_beside_the_allocator(monkeypatch):
    held = {"driver": 700 * MIB, "reserved": 200 * MIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8192 * MIB - held["driver"], 8192 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held["reserved"])
    monkeypatch.setattr(overheads, "_context_bytes", overheads._held_outside())
    assert overheads.device_overheads() == (500 * MIB, 0)

    held["driver"] += 340 * MIB
    held["reserved"] += 40 * MIB

    assert overheads.device_overheads() == (500 * MIB, 300 * MIB)
