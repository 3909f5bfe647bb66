"""Random plans of all that the planner can choose train like one plain process: many cases per spawn of gloo ranks."""

import json
import os
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.random_plans import CLIPPED, curve_of_rank, draw_drills, plain_curve
from tests.ranks import free_port, start_ranks

# Ranks per node: cases. OSDP_DRILLS=7 draws seven times as many, over a hundred plans, which takes some ten minutes.
TIMES = int(os.environ.get("OSDP_DRILLS", "1"))
WORLDS = {(1,): 6 * TIMES, (2,): 5 * TIMES, (2, 2): 4 * TIMES}
NUM_BF16 = TIMES
FP32_FRACTION, NUM_NOISY = 1e-5, 3
# bf16 keeps 8 bits: sums in another order (a mean over ranks for one over micro-batches, products over slices) differ
# by units of its last place, and so does what five steps make of them.
BF16_FRACTION = 2**-6


def run_rank(rank, num_ranks, port, drills, out):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # models of transformers give views
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    curves = [curve_of_rank(drill, rank, num_ranks) for drill in drills]
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(curves, file)
    dist.destroy_process_group()


def farther_than(found, wanted, fraction):
    """(step, 0 for the loss, 1 for the norm) of what is farther apart than this fraction."""
    places = [(step, kind) for step in range(len(wanted)) for kind in range(2)]
    return [(s, k) for s, k in places if abs(found[s][k] - wanted[s][k]) > fraction * abs(wanted[s][k])]


def within(found, wanted, own, step, kind):
    """Whether a process of its own is as far apart when the last bit of its gradients is off.

    A step on whose way an activation or an update changes its sign does not keep to one part in a hundred thousand.
    """
    most = max(abs(curve[step][kind] - wanted[step][kind]) for curve in own)
    return abs(found[step][kind] - wanted[step][kind]) <= 2 * most


@pytest.mark.parametrize("ranks_per_node", WORLDS, ids=str)
def test_any_random_plan_gives_the_losses_and_gradient_norms_of_one_process(ranks_per_node, tmp_path):
    drills = draw_drills(ranks_per_node, WORLDS[ranks_per_node], seed=0)
    drills += draw_drills(ranks_per_node, NUM_BF16, seed=0, precision="bf16")
    num_ranks = sum(ranks_per_node)
    port = free_port()

    start_ranks(run_rank, (num_ranks, port, drills, str(tmp_path)), num_ranks)

    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(curves == by_rank[0] for curves in by_rank), "ranks disagree on the global loss or norm"
    plain = {drill.plain: plain_curve(drill) for drill in drills}
    for drill, found in zip(drills, by_rank[0], strict=True):
        fraction = FP32_FRACTION if drill.plan.precision == "fp32" else BF16_FRACTION
        off = farther_than(found, plain[drill.plain], fraction)
        if off and drill.plan.precision == "fp32":
            own = [plain_curve(drill, noise=seed) for seed in range(NUM_NOISY)]
            off = [place for place in off if not within(found, plain[drill.plain], own, *place)]
        assert not off, f"(step, loss or norm) {off}: {found} for {plain[drill.plain]}: {drill.label}"
    clipped = [max(norm for _, norm in plain[drill.plain]) for drill in drills if drill.max_norm == CLIPPED]
    assert min(clipped) > CLIPPED, "no case would notice that nothing is clipped"
