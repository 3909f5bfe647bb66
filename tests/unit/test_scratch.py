"""What kernels hold that only running them tells: noted at two micro-batches, measured at any."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from osdp_ray.profiling import scratch
from osdp_ray.profiling.scratch import Kernels, call_of, is_measured
from osdp_ray.records.scratch import KernelScratch

aten = torch.ops.aten


def product(rows):
    """A call of addmm as Linear makes it, for so many rows of 8 numbers, under fake tensors."""
    with FakeTensorMode():
        inputs, weight, bias = torch.empty(rows, 8), torch.empty(16, 8), torch.empty(16)
        return call_of(aten.addmm.default, (bias, inputs, weight.t()), {"beta": 1})


def sum_of_ints(rows):
    """A call whose kernel copies its input into the type of its result: 8 bytes for each of the 4 of a row."""
    return call_of(aten.cumsum.default, (torch.zeros(rows * 4, dtype=torch.int32), 0), {})


def test_between_measured_micro_batches_the_larger_counts_and_above_them_growth_goes_on():
    found = KernelScratch(points=((1, 10), (2, 40), (4, 30), (8, 70)))
    assert [found.num_bytes(m) for m in (1, 2, 3, 4, 5, 8)] == [10, 40, 40, 30, 70, 70]
    assert [found.num_bytes(m) for m in (9, 12, 16)] == [80, 110, 150]
    assert KernelScratch(points=((2, 70), (4, 50))).num_bytes(8) == 50
    assert KernelScratch(points=((2, 70),)).num_bytes(1) == KernelScratch(points=((2, 70),)).num_bytes(9) == 70
    assert KernelScratch(points=()).num_bytes(3) == 0


def test_two_micro_batches_tell_what_a_kernel_is_called_with_at_any():
    kernels = Kernels((2, 3))
    assert kernels.number(product(2 * 5), product(3 * 5)) == 1
    assert kernels.number(product(2 * 7), product(3 * 7)) == 2
    assert kernels.number(product(2 * 5), product(3 * 5)) == 1
    (first, second) = kernels._numbers
    assert first.at(11) == product(11 * 5)
    assert second.at(1) == product(7)


def test_a_run_of_one_sample_finds_the_kernels_of_the_others():
    kernels = Kernels((2, 3))
    number = kernels.number(product(10), product(15))
    alone, other = product(5), product(6)
    assert kernels.number(alone, alone) == number
    assert kernels.number(other, other) == number + 1


def test_a_kernel_that_two_micro_batches_do_not_tell_is_left_out():
    kernels = Kernels((2, 4))
    assert kernels.number(product(10), product(15)) == 0
    assert kernels.number(product(10), sum_of_ints(10)) == 0
    assert kernels.measure() == ()


def test_kernels_are_measured_beyond_what_goes_in_and_comes_out():
    kernels = Kernels((2, 3))
    kernels.number(sum_of_ints(2), sum_of_ints(3))
    kernels.number(product(10), product(15))
    num_threads = torch.get_num_threads()
    of_sum, of_product = kernels.measure()
    assert torch.get_num_threads() == num_threads
    assert of_sum.points[:4] == ((1, 32), (2, 64), (3, 96), (4, 128))
    assert of_sum.points[-1] == (64, 64 * 32)
    assert all(num_bytes == 0 for _, num_bytes in of_product.points)


def test_calls_that_hold_or_take_too_much_are_left_to_what_was_measured_before(monkeypatch):
    monkeypatch.setattr(scratch, "_MOST_BYTES", 4 * 16 + 1)
    kernels = Kernels((2, 3))
    kernels.number(sum_of_ints(2), sum_of_ints(3))
    (found,) = kernels.measure()
    assert found.points == ((1, 32), (2, 64), (3, 96), (4, 128))
    monkeypatch.setattr(scratch, "_LIMIT_S", -1.0)
    assert kernels.measure() == (KernelScratch(points=()),)


def test_only_16_bit_floats_on_processors_that_pack_them_are_measured(monkeypatch):
    narrow, wide = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2)
    monkeypatch.setattr(scratch, "has_packing_kernels", lambda: True)
    assert is_measured(aten.mm.default, (narrow, narrow))
    assert not is_measured(aten.mm.default, (wide, wide))
    assert not is_measured(aten.add.Tensor, (narrow, narrow))
    monkeypatch.setattr(scratch, "has_packing_kernels", lambda: False)
    assert not is_measured(aten.mm.default, (narrow, narrow))


PACKING = """
import torch
from osdp_ray.costs import simulate_bytes
from osdp_ray.profiling.scratch import has_packing_kernels
from tests.memory_cases import build_case, draw_cases
from tests.oracle import measure

torch.set_num_threads(1)
if not has_packing_kernels():
    raise SystemExit(77)
draws = [d for d in draw_cases(220, 1) if d.precision == "bf16" and d.num_ranks <= 8]
for model in ("gpt", "gpt-wide", "llama"):
    draw = next((d for d in draws if d.model == model), None)
    if draw is None:
        continue
    case = build_case(draw)
    found, truth = simulate_bytes(case.profile, case.plan), measure(case.workload, case.plan, evaluates=True)
    assert case.profile.scratch, draw.label
    step, evaluation = found.peak_bytes / truth.peak_bytes, found.peak_by_phase["evaluation"] / truth.evaluation_bytes
    assert 0.995 <= step <= 1.02, (draw.label, step)
    assert 0.995 <= evaluation <= 1.02, (draw.label, evaluation)
"""


def test_bf16_peaks_are_right_on_a_processor_whose_products_pack_their_operands():
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", PACKING],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this processor has no such instructions")
    assert done.returncode == 0, done.stderr[-2000:]
