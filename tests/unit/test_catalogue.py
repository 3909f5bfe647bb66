"""Cluster files: the catalogue, the format, and what is wrong with a file, by line and key."""

import re
from pathlib import Path

import pytest

import osdp_ray.catalogue
from osdp_ray.catalogue import catalogue_names, load_hardware, parse_hardware
from osdp_ray.errors import ClusterFileError, UsageError
from osdp_ray.units import GIB, parse_bytes_per_s, parse_flops_per_s, parse_seconds

FOLDER = Path(osdp_ray.catalogue.__file__).parent
GOOD = """\
name: two kinds of nodes
backend: nccl
overlap: true
nodes:
  - count: 2
    devices: 4
    device:
      kind: cuda
      name: large
      memory: 80GiB
      memory_bandwidth: 2000GB/s
      memory_achieved: 0.9
      peak: {fp32: 20TFLOP/s, bf16: 300TFLOP/s}
      achieved: {fp32: 0.9, bf16: 0.5}
      launch: 4us
    link: {bandwidth: 300GB/s, achieved: 0.8, latency: 2us}
  - count: 1
    devices: 2
    device:
      kind: cuda
      name: small
      memory: 24GiB
      memory_bandwidth: 1000GB/s
      memory_achieved: 0.9
      peak: {fp32: 40TFLOP/s}
      achieved: {fp32: 0.8}
      launch: 4us
    link: {bandwidth: 16GB/s, achieved: 0.75, latency: 2.5us}
across:
  bandwidth: 100Gbit/s
  achieved: 0.9
  latency: 4us
"""


def test_a_file_with_two_kinds_of_nodes_is_read_with_all_its_figures():
    hardware = parse_hardware(GOOD, path="c.yaml")
    assert hardware.ranks_per_node == (4, 4, 2)
    assert (hardware.backend, hardware.device_kind, hardware.overlaps) == ("nccl", "cuda", True)
    assert hardware.smallest_memory_bytes == 24 * GIB
    large, small = hardware.devices
    assert large.flops_per_s("bf16") == 150e12
    assert large.achieved_bytes_per_s == 1800e9
    assert small.peak_flops_per_s == {"fp32": 40e12}
    assert large.launch_s == 4e-6
    assert hardware.inner_links[1].achieved_bytes_per_s == 12e9
    assert hardware.across.bytes_per_s == 12.5e9


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("memory: 80GiB", "memroy: 80GiB", 10, "nodes[0].device.memroy: there is no such key (did you mean 'memory'?)"),
        ("    link: {b", "    colour: red\n    link: {b", 16, "nodes[0].colour: there is no such key. Here are count"),
        ("  latency: 4us\n", "", 30, "across.latency: this key is missing. Add it"),
        ("  - count: 1\n    devices", "  - devices", 17, "nodes[1].count: this key is missing"),
        ("memory: 80GiB", "memory: 80", 10, "'80' is no size with a unit; write it like 300MiB or 16GiB"),
        ("memory: 80GiB", "memory: -80GiB", 10, "nodes[0].device.memory: '-80GiB' is below 0. Give it a positive"),
        ("memory: 80GiB", "memory: 0GiB", 10, "'0GiB' is 0. Give it a number above 0"),
        ("memory: 80GiB", "memory:", 10, "it has no value"),
        ("memory: 80GiB", "memory: [80GiB]", 10, "one value is needed, not a list"),
        ("2000GB/s", "2000GB", 11, "'2000GB' is no rate with a unit; write it like 300GB/s or 100Gbit/s"),
        ("fp32: 20TFLOP/s", "fp32: 20TFLOPS", 13, "'TFLOPS' in '20TFLOPS' is no unit of arithmetic rate; use MFLOP/s"),
        ("fp32: 20TFLOP/s, ", "", 13, "nodes[0].device.peak.fp32: this key is missing"),
        ("fp32: 0.9, bf16: 0.5", "fp32: 0.9", 14, "nodes[0].device.achieved.bf16: this key is missing"),
        ("bf16: 0.5", "bf16: 50", 14, "'50' is no fraction above 0 and at most 1"),
        ("bf16: 0.5", "bf16: 0.5, fp8: 0.5", 14, "nodes[0].device.achieved.fp8: there is no such key"),
        ("devices: 4", "devices: 0", 6, "'0' is no whole number above 0"),
        ("devices: 4", "devices: 4.5", 6, "'4.5' is no whole number above 0"),
        ("devices: 4", "devices: 4\n    devices: 4", 7, "it stands here a second time, first in line 6"),
        ("backend: nccl", "backend: ncl", 2, "'ncl' is none of nccl, gloo (did you mean 'nccl'?)"),
        ("kind: cuda", "kind: cpu", 8, "'cpu' devices do not communicate by nccl. Use backend gloo"),
        ("overlap: true", "overlap: often", 3, "'often' is none of true, false"),
        ("latency: 4us", "latency: 4", 32, "across.latency: '4' is no duration with a unit; write it like 4us"),
        ("nodes:\n", "nodes: {}\nx:\n", 4, "a list is needed, not keys with values"),
        ("name: two", "name: [two", 2, "it is no YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_by_line_and_key(old, new, line, text):
    assert old in GOOD
    with pytest.raises(ClusterFileError) as caught:
        parse_hardware(GOOD.replace(old, new, 1), path="mine.yaml")
    assert str(caught.value).startswith(f"mine.yaml, line {line}")
    assert text in str(caught.value)


def test_links_are_needed_where_there_is_something_to_join():
    alone = GOOD.replace("count: 2", "count: 1").split("  - count: 1\n    devices: 2")[0]
    assert parse_hardware(alone, path="c.yaml").across is None
    with pytest.raises(ClusterFileError, match=r"across: this key is missing"):
        parse_hardware(alone.replace("count: 1", "count: 2"), path="c.yaml")
    with pytest.raises(ClusterFileError, match=r"nodes\[0\].link: this key is missing"):
        parse_hardware(re.sub("    link.*\n", "", alone), path="c.yaml")
    single = re.sub("    link.*\n", "", alone).replace("devices: 4", "devices: 1")
    assert parse_hardware(single, path="c.yaml").ranks_per_node == (1,)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a list\n", "\x00", "!!python/object/apply:os.getcwd []"])
def test_what_is_no_mapping_is_refused_with_its_line(text):
    with pytest.raises(ClusterFileError, match=r"c.yaml, line 1"):
        parse_hardware(text, path="c.yaml")


@pytest.mark.parametrize("name", catalogue_names())
def test_every_entry_of_the_catalogue_has_the_devices_it_is_named_for_and_names_its_sources(name):
    hardware = load_hardware(name)
    assert sum(hardware.ranks_per_node) == int(name.partition("x-")[0] if "x-" in name else name.partition("x")[0])
    links = [link for link in (*hardware.inner_links, hardware.across) if link is not None]
    for part in (hardware, *hardware.devices, *links):
        assert part.source.startswith("https://")
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.count("#") > len(links) + len(hardware.devices)


def test_the_catalogue_has_the_six_clusters_that_are_promised():
    assert catalogue_names() == (
        "1024x-h100-infiniband",
        "16x-a100-100gbit",
        "4x-rtx4090-1gbit",
        "64x-h100-infiniband",
        "8x-a100-nvlink",
        "8x-titan-rtx-pcie3",
    )


def test_a_wrong_name_lists_the_right_ones_with_a_guess():
    with pytest.raises(
        UsageError, match=r"'8x-a100-nvlnk', and no file \(did you mean '8x-a100-nvlink'\?\).*1024x-h100"
    ):
        load_hardware("8x-a100-nvlnk")


def test_a_path_is_read_and_one_that_cannot_be_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_hardware(str(path)).name == "two kinds of nodes"
    with pytest.raises(UsageError, match=r"cannot be read .*Give --cluster a YAML file"):
        load_hardware(str(tmp_path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterFileError, match="it is no text"):
        load_hardware(str(path))


def test_rates_and_durations_are_read_with_their_units():
    assert parse_bytes_per_s("100Gbit/s") == 12.5e9
    assert parse_bytes_per_s("1 GiB/s") == GIB
    assert parse_flops_per_s("1PFLOP/s") == 1e15
    assert parse_seconds("1.5 ms") == 1.5e-3
    with pytest.raises(ValueError, match="'Gb' in '100Gb/s' may mean bits or bytes; write it like"):
        parse_bytes_per_s("100Gb/s")
    with pytest.raises(ValueError, match="'3GB/h' is no rate with a unit"):
        parse_bytes_per_s("3GB/h")
    with pytest.raises(ValueError, match="'min' in '3min' is no unit of duration; use ns, us, ms, s"):
        parse_seconds("3min")
