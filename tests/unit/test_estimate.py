"""Profiles of hardware that is not here, against values worked out by hand."""

import dataclasses

import pytest
import torch
from torch import nn

from osdp_ray.catalogue import load_hardware
from osdp_ray.cli import main
from osdp_ray.costs import predict
from osdp_ray.errors import UsageError
from osdp_ray.planning import plan
from osdp_ray.profiling.estimate import (
    compute_costs,
    estimate,
    estimate_links,
    optimizer_cost,
    ring_link,
    work_seconds,
)
from osdp_ray.profiling.links import FREE_BYTES_PER_S
from osdp_ray.profiling.trace import trace
from osdp_ray.profiling.work import Counter, Work, operation_bytes, operation_flops
from osdp_ray.records.hardware import DeviceSpec, Hardware, LinkSpec, NodeGroup
from osdp_ray.units import GIB
from osdp_ray.workload import Workload
from osdp_ray.workloads.gpt import GptWorkload
from tests.unit.test_catalogue import GOOD

aten = torch.ops.aten
HIDDEN, SEQUENCE, LAYERS = 32, 16, 4

DEVICE = DeviceSpec(
    kind="cuda",
    name="round",
    memory_bytes=10 * GIB,
    memory_bytes_per_s=200e9,
    memory_achieved_fraction=0.5,
    peak_flops_per_s={"fp32": 10e12, "bf16": 100e12},
    achieved_fraction={"fp32": 0.5, "bf16": 0.5},
    launch_s=4e-6,
)
INNER = LinkSpec(bytes_per_s=20e9, achieved_fraction=0.5, latency_s=2e-6)
ACROSS = LinkSpec(bytes_per_s=16e9, achieved_fraction=0.25, latency_s=10e-6)


def cluster(num_nodes=2, per_node=4, *, device=DEVICE, inner=INNER, across=ACROSS, backend="nccl"):
    group = NodeGroup(num_nodes=num_nodes, devices_per_node=per_node, device=device, link=inner)
    return Hardware(name="round", backend=backend, overlaps=True, groups=(group,), across=across)


class Small(Workload):
    """A model for its optimizer and its two products."""

    name = "small"

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def build_model(self):
        return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))

    def build_batches(self, rank, num_ranks, micro_batch, seed, start_step):
        while True:
            yield torch.zeros(micro_batch, 64)

    def loss(self, model, batch):
        return model(batch).square().mean()

    def build_optimizer(self, parameters):
        return self.optimizer(parameters)

    @property
    def blocks(self):
        return ()


@pytest.fixture(scope="module")
def gpt_work():
    workload = GptWorkload(layers=LAYERS, hidden=HIDDEN, heads=4, sequence=SEQUENCE)
    traced = trace(workload, counts_work=True)
    (block,) = (i for i, section_class in enumerate(traced.structure.classes) if section_class.is_block)
    return {item.recompute: item for item in traced.work if item.class_index == block}, traced


def flops(work, micro_batch=1):
    return sum(item.flops(micro_batch) for item in work)


def num_bytes(work, micro_batch=1):
    return sum(item.num_bytes(micro_batch) for item in work)


# -- what operations compute and move


def test_a_linear_costs_two_operations_per_weight_and_sample_and_its_gradients_as_much_again():
    work = trace(Small(torch.optim.SGD), counts_work=True).work
    first, second = 2 * 64 * 32, 2 * 32 * 16
    assert sum(flops(item.forward, 5) for item in work) == 5 * (first + second)
    # Both weights have a gradient, and only the second one's input.
    assert sum(flops(item.backward, 5) for item in work) == 5 * (first + second + second)


def test_a_transformer_block_costs_24_hidden_squared_per_token_and_half_its_attention(gpt_work):
    plain = gpt_work[0]["none"]
    products, attention = 24 * HIDDEN**2 * SEQUENCE, 4 * SEQUENCE**2 * HIDDEN // 2
    assert flops(plain.forward, 3) == 3 * (products + attention)
    assert flops(plain.backward, 3) == 3 * (2 * products + 2.5 * attention)


def test_recomputing_selectively_repeats_no_product_and_recomputing_all_repeats_them(gpt_work):
    plain, selective, full = (gpt_work[0][kind] for kind in ("none", "selective", "full"))
    assert flops(selective.backward) == flops(plain.backward)
    assert num_bytes(selective.backward) > num_bytes(plain.backward)
    repeated = flops(full.backward) - flops(plain.backward)
    assert flops(plain.forward) / 2 < repeated <= flops(plain.forward)  # it stops at the last tensor that is needed
    assert plain.forward == selective.forward == full.forward


def test_no_work_is_kept_unless_it_is_asked_for():
    assert trace(Small(torch.optim.SGD)).work == ()


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (aten.add.Tensor, lambda x, y: (x, y), 3 * 400),
        (aten.add.Tensor, lambda x, y: (x, y[:1].expand(10, 10)), 3 * 400),  # its storage is whole
        (aten.add.Tensor, lambda x, y: (x, torch.ones(1, 1).expand(10, 10)), 2 * 400 + 4),
        (aten.add_.Tensor, lambda x, y: (x, y), 3 * 400),
        (aten.copy_.default, lambda x, y: (x, y), 2 * 400),
        (aten.zero_.default, lambda x, y: (x,), 400),
        (aten.zeros_like.default, lambda x, y: (x,), 400),
        (aten.view.default, lambda x, y: (x, (100,)), 0),
        (aten.t.default, lambda x, y: (x,), 0),
        (aten.empty_like.default, lambda x, y: (x,), 0),
        (aten.mm.default, lambda x, y: (x, y), 3 * 400),
        (aten.embedding.default, lambda x, y: (x, torch.tensor([1, 2])), 2 * 80 + 16),
    ],
)
def test_an_operation_moves_what_it_reads_and_writes(function, args, expected):
    args = args(torch.zeros(10, 10), torch.zeros(10, 10))
    assert operation_bytes(function, args, {}, function(*args)) == expected


def test_products_of_groups_and_batches_count_every_row_once():
    a, b = torch.zeros(6, 8), torch.zeros(3, 8, 4)
    assert operation_flops(aten._grouped_mm.default, (a, b), {}, None) == 2 * 6 * 8 * 4
    batched = (torch.zeros(3, 2, 8), b)
    assert operation_flops(aten.bmm.default, batched, {}, aten.bmm(*batched)) == 3 * 2 * 2 * 8 * 4
    assert operation_flops(aten.relu.default, (a,), {}, a) == 0


def test_the_first_operand_tells_what_is_computed_in():
    counter = Counter()
    wide, narrow = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    for args in ((wide, wide), (narrow, narrow)):
        counter(0, aten.mm.default, args, {}, aten.mm(*args))
    assert [item.precision for item in counter.counted] == ["fp32", "bf16"]


# -- seconds


def test_an_operation_takes_its_launch_and_the_longer_of_arithmetic_and_memory():
    def work(precision, flops, moved):
        return Work(
            precision=precision, flops_constant=0, flops_per_sample=flops, bytes_constant=0, bytes_per_sample=moved
        )

    arithmetic, memory = work("fp32", 1e12, 1e9), work("fp32", 1e9, 1e9)
    assert work_seconds([arithmetic], DEVICE, 2) == pytest.approx(4e-6 + 2e12 / 5e12)
    assert work_seconds([memory], DEVICE, 2) == pytest.approx(4e-6 + 2e9 / 100e9)
    assert work_seconds([arithmetic, memory], DEVICE, 1) == pytest.approx(8e-6 + 0.2 + 0.01)
    assert work_seconds([work("bf16", 1e12, 1e9)], DEVICE, 1) == pytest.approx(4e-6 + 1e12 / 50e12)


def test_the_slowest_device_rules(gpt_work):
    slow = dataclasses.replace(DEVICE, launch_s=1e-3)
    mixed = cluster()
    mixed = dataclasses.replace(mixed, groups=(*mixed.groups, *cluster(device=slow).groups))
    assert compute_costs(gpt_work[1].work, mixed) == compute_costs(gpt_work[1].work, cluster(device=slow))


def test_a_block_takes_the_sum_of_its_operations_and_recomputing_takes_more(gpt_work):
    work, traced = gpt_work
    block = next(i for i, section_class in enumerate(traced.structure.classes) if section_class.is_block)
    cost = compute_costs(traced.work, cluster())[block]
    for micro_batch in (1, 4, 8):
        assert cost.forward_s(micro_batch) == pytest.approx(
            work_seconds(work["none"].forward, DEVICE, micro_batch), rel=0.02
        )
        assert cost.backward_s(micro_batch) > cost.forward_s(micro_batch)
        more = work_seconds(work["selective"].backward, DEVICE, micro_batch) - cost.backward_s(micro_batch)
        assert cost.recompute_s("selective", micro_batch) == pytest.approx(more, rel=0.1)
        assert 0 < cost.recompute_s("selective", micro_batch) < cost.recompute_s("full", micro_batch)


# -- links


def test_a_ring_takes_its_hops_and_all_but_one_part_of_the_tensor():
    shape = {"num_ranks": 4, "bytes_per_s": 1e9, "hops_s": 30e-6, "launch_s": 5e-6}
    gather = ring_link("world", "all_gather", **shape)
    assert gather.seconds(100_000_000) == pytest.approx(5e-6 + 30e-6 + 0.75 * 0.1)
    assert ring_link("world", "reduce_scatter", **shape).seconds(10**8) == gather.seconds(10**8)
    reduce = ring_link("world", "all_reduce", **shape)
    assert reduce.seconds(100_000_000) == pytest.approx(5e-6 + 2 * (30e-6 + 0.75 * 0.1))


def test_two_nodes_of_four_have_rings_inside_across_and_over_all():
    links = {(link.group, link.collective): link for link in estimate_links(cluster())}
    n = 10**9
    # Inside: 3 hops of 2 us, 10 GB/s. Over all: 6 of 2 us, one of 10 us, a node's 4 GB/s. Across: 1 GB/s each.
    assert links["node", "all_gather"].seconds(n) == pytest.approx(4e-6 + 3 * 2e-6 + 0.75 / 10)
    assert links["world", "all_gather"].seconds(n) == pytest.approx(4e-6 + 6 * 2e-6 + 10e-6 + 0.875 / 4)
    assert links["across", "all_gather"].seconds(n) == pytest.approx(4e-6 + 10e-6 + 0.5 / 1)
    assert len(links) == 9


def test_one_node_has_the_world_alone_and_one_device_no_links_to_pay():
    assert {link.group for link in estimate_links(cluster(1, 8, across=None))} == {"world"}
    (gather, *_) = estimate_links(cluster(1, 1, inner=None, across=None))
    assert (gather.latency_s, gather.bytes_per_s) == (0, FREE_BYTES_PER_S)
    wire = estimate_links(cluster(4, 1, inner=None))
    assert wire[0].seconds(10**9) == pytest.approx(4e-6 + 3 * 10e-6 + 0.75 / 4)


def test_a_faster_link_is_never_slower_and_a_slower_one_of_two_kinds_rules():
    def twice(link):
        return dataclasses.replace(link, bytes_per_s=2 * link.bytes_per_s)

    base = estimate_links(cluster())
    for faster in (cluster(inner=twice(INNER)), cluster(across=twice(ACROSS))):
        pairs = list(zip(estimate_links(faster), base, strict=True))
        assert all(new.seconds(n) <= old.seconds(n) for new, old in pairs for n in (1, 10**9))
        assert any(new.seconds(10**9) < old.seconds(10**9) for new, old in pairs)
    mixed = cluster(1)
    mixed = dataclasses.replace(mixed, groups=(*mixed.groups, *cluster(1, inner=twice(INNER)).groups))
    assert estimate_links(mixed) == base


# -- the optimizer


@pytest.mark.parametrize(
    ("optimizer", "moved", "state", "temporary"),
    [
        # fused AdamW reads the parameter, its gradient and two moments, and writes all but the gradient
        (lambda p: torch.optim.AdamW(p, fused=True), 7, 2, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 3, 0, 0),  # reads two, writes one
    ],
)
def test_an_optimizer_takes_the_bytes_that_it_moves(optimizer, moved, state, temporary):
    cost = optimizer_cost(Small(optimizer), cluster())
    assert cost.step_s_per_byte == pytest.approx(moved / 100e9, rel=1e-3)
    assert cost.step_s_per_tensor == 0
    assert (cost.state_bytes_per_byte, cost.step_bytes_per_total) == (state, temporary)


def test_an_unfused_optimizer_holds_temporaries_of_all_tensors_on_a_gpu_and_of_one_on_a_cpu():
    on_gpu = optimizer_cost(Small(torch.optim.AdamW), cluster())
    on_cpu = optimizer_cost(Small(torch.optim.AdamW), cluster(device=dataclasses.replace(DEVICE, kind="cpu")))
    assert on_gpu.step_bytes_per_total >= 1
    assert on_cpu.step_bytes_per_total == 0
    assert on_gpu.step_s_per_tensor == 0 < on_cpu.step_s_per_tensor


# -- whole profiles


def test_a_profile_of_the_catalogue_is_planned_and_better_hardware_is_never_slower():
    hardware = load_hardware("8x-a100-nvlink")
    profile = estimate(Small(lambda p: torch.optim.AdamW(p, fused=True)), hardware)
    assert (profile.device_kind, profile.backend, profile.num_ranks) == ("cuda", "nccl", 8)
    assert profile.device_memory_bytes == 80 * GIB
    assert profile.overlaps
    assert profile.copy_bytes_per_s == pytest.approx(2039e9 * 0.9 / 2)
    made = plan(profile, budget_bytes=2 * GIB, global_batch=64)
    group = hardware.groups[0]
    link = dataclasses.replace(group.link, bytes_per_s=2 * group.link.bytes_per_s)
    faster = dataclasses.replace(hardware, groups=(dataclasses.replace(group, link=link),))
    better = dataclasses.replace(profile, links=estimate_links(faster))
    assert predict(better, made).step_s <= predict(profile, made).step_s
    assert plan(better, budget_bytes=2 * GIB, global_batch=64).prediction.step_s <= made.prediction.step_s


def test_a_precision_that_a_device_lacks_is_refused():
    workload = GptWorkload()
    workload.precision = "bf16"
    with pytest.raises(UsageError, match=r"TITAN RTX.*has no arithmetic rate for bf16\. Use --precision fp32"):
        estimate(workload, load_hardware("8x-titan-rtx-pcie3"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["profile", "gpt", "--cluster", "8x-titan"], "did you mean '8x-titan-rtx-pcie3'?"),
        (["profile", "gpt", "--cluster", "8x-a100-nvlink", "--num-workers", "2"], "--num-workers is of a cluster that"),
        (["profile", "gpt", "--cluster", "8x-a100-nvlink", "--address", "x:1"], "--address is of a cluster that"),
        (["plan", "gpt", "layers=4"], "layers=4 belongs to a workload, and gpt is read as a profile"),
        (["plan", "gpt", "--precision", "bf16"], "--precision belongs to a workload"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line_with_the_remedy(words, text, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert text in error


def test_where_devices_differ_the_smallest_memory_rules_and_the_command_says_so(tmp_path, capsys):
    path = tmp_path / "mixed.yaml"
    path.write_text(GOOD)
    assert main(["plan", "gpt", "layers=1", "hidden=64", "--cluster", str(path), "--global-batch", "10"]) == 0
    shown = capsys.readouterr()
    assert "devices differ, and a plan is the same on all: the 24.00 GiB of small rule" in shown.err
    assert "of 21.60 GiB per device" in shown.out
