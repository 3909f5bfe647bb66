"""The ring scatter over real gloo ranks against gloo's own."""

import itertools

import torch
import torch.distributed as dist

from osdp_ray.modeling.ring import RingReduceScatter
from tests.ranks import free_port, start_ranks

NUM_RANKS = 4
SIZES = (NUM_RANKS * 1001, NUM_RANKS * 40_003)  # chunks that go whole, and in pieces that are not alike


def compare(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    ring = RingReduceScatter()
    pairs = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    for numel, group in itertools.product(SIZES, (dist.group.WORLD, pairs)):
        whole = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):  # the last is gloo's own in both
            own, ours = (torch.empty(numel // group.size()) for _ in range(2))
            dist.reduce_scatter_single(own, whole.clone(), op=op, group=group)
            assert ring(ours, whole.clone(), group, op) is None or op == dist.ReduceOp.MAX
            torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)
        half = whole.bfloat16()
        ours = torch.empty(numel // group.size(), dtype=torch.bfloat16)
        ring(ours, half.clone(), group, dist.ReduceOp.SUM)
        own = torch.empty_like(ours)
        dist.reduce_scatter_single(own, half, op=dist.ReduceOp.SUM, group=group)
        torch.testing.assert_close(ours, own, rtol=0.05, atol=0.05)
    alone = dist.new_subgroups_by_enumeration([[r] for r in range(NUM_RANKS)])[0]
    out = torch.empty_like(whole)
    ring(out, whole.clone(), alone, dist.ReduceOp.SUM)
    torch.testing.assert_close(out, whole)
    dist.destroy_process_group()


def test_the_ring_scatters_what_gloo_scatters_in_the_world_and_in_groups_of_it():
    port = free_port()
    start_ranks(compare, (port,), NUM_RANKS)
