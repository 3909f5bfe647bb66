"""Bytes of a unit, worked out by hand."""

import dataclasses

import pytest

from osdp_ray.costs import simulate_sections
from osdp_ray.costs.units import unit_bytes
from osdp_ray.planning.choices import uniform_sections
from osdp_ray.records.plan import Choice, Unit
from osdp_ray.records.profile import Operator, Parameter, SectionClass
from tests.random_profiles import base_profile

CLASS = SectionClass(
    name="Layer",
    is_block=True,
    parameters=(
        Parameter(name="a.weight", shape=(5, 100), itemsize_bytes=4, requires_grad=True),
        Parameter(name="a.bias", shape=(5,), itemsize_bytes=4, requires_grad=False),
    ),
    operators=(Operator(name="a", kind="Linear", modules=("a",), parameters=(0, 1), buffer_bytes=0),),
)


def sizes(shard_over, *, precision="fp32", device_kind="cpu"):
    unit = Unit(operators=("a",), modules=("a",), choice=Choice(shard_over=shard_over, regather=True))
    return unit_bytes(CLASS, unit, (2,), precision, device_kind)


def test_shards_are_padded_to_the_largest_and_frozen_parameters_have_no_gradient():
    held = sizes("world")  # 3 of 5 rows a rank
    assert held.shard_bytes == 3 * 400 + 3 * 4
    assert held.flat_bytes == held.gathered_bytes == 6 * 400 + 6 * 4
    assert (held.gradient_bytes, held.reduce_bytes) == (3 * 400, 6 * 400)
    assert (held.local_bytes(0), held.local_bytes(1)) == (3 * 400, 2 * 400)
    assert held.scatter_copy_bytes == 6 * 400  # 5 rows do not divide by 2


def test_what_is_computed_in_bf16_is_gathered_in_it_and_reduced_in_fp32():
    held = sizes("world", precision="bf16")
    assert held.gathered_bytes == 6 * 200 + 6 * 2
    assert held.reduce_bytes == 6 * 400
    assert held.scatter_copy_bytes == 6 * 200 + 6 * 200  # the padded copy, and the one in the other type


def test_the_allocator_of_a_gpu_rounds_every_tensor_up_to_512_bytes():
    held = sizes("none", device_kind="cuda")
    assert held.shard_bytes == held.gradient_bytes + 512 == 2048 + 512  # one of the two parameters is frozen
    assert held.local_bytes(0) == 2048
    assert sizes("world", device_kind="cuda").gathered_bytes == 2560 + 512  # 6 rows, padded


def test_a_replicated_unit_uses_what_is_stored_and_copies_what_is_cast():
    assert sizes("none").gathered_bytes == sizes("none").copy_peak_bytes == 0
    cast = sizes("none", precision="bf16")
    assert cast.gathered_bytes == cast.copy_peak_bytes == sizes("none").shard_bytes // 2
    assert cast.cast_bytes == 0


@pytest.mark.parametrize("name", ["none", "world"])
def test_a_gpu_holds_a_little_more_between_steps_and_none_of_a_cpus_workspaces(name):
    profile = base_profile()
    sections = uniform_sections(profile, Choice(shard_over=name, regather=True), "none")
    gpu = dataclasses.replace(profile, device_kind="cuda")
    cpu_held, gpu_held = (simulate_sections(p, sections, micro_batch=4, accumulation=1) for p in (profile, gpu))
    assert cpu_held.persistent_bytes <= gpu_held.persistent_bytes < 1.02 * cpu_held.persistent_bytes
    assert gpu_held.peak_bytes == pytest.approx(cpu_held.peak_bytes, rel=0.02)
