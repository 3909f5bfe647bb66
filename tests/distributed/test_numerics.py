"""Any plan trains like one plain process: losses and gradient norms over real gloo ranks, several plans per spawn."""

import dataclasses
import json
import random

import pytest
import torch
import torch.distributed as dist

from osdp_ray.errors import PlanMismatchError, ShardingError
from osdp_ray.execution.apply import parallelize
from osdp_ray.execution.clipping import clip_grad_norm
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.planning.choices import group_units, uniform_sections
from osdp_ray.profiling.trace import trace
from osdp_ray.records.plan import Choice, SectionPlan
from osdp_ray.workloads.gpt import GptWorkload
from tests.oracle import UNIFORM_CHOICES, make_plan, random_sections, traced_profile
from tests.ranks import free_port, start_ranks

NUM_STEPS, GLOBAL_BATCH, SEED, MAX_NORM = 4, 8, 11, 0.5
DP, ZERO2, ZERO3 = (UNIFORM_CHOICES[name] for name in ("DP", "ZeRO-2", "ZeRO-3"))
HSDP = Choice(shard_over="node", regather=True)


def workload(data, *, tied=False):
    return GptWorkload(layers=3, hidden=32, heads=2, sequence=16, data=data, tied=tied, learning_rate=1e-2)


def mixed_sections(profile):
    """Operators of every block differ, blocks differ, and the middle one recomputes."""
    sections = []
    for position, section in enumerate(profile.sections):
        section_class = profile.classes[section.class_index]
        palette = (DP, ZERO3, ZERO2)
        choices = {
            operator.name: palette[(position + index) % 3] for index, operator in enumerate(section_class.operators)
        }
        recompute = "full" if section_class.is_block and position == 2 else "none"
        sections.append(
            SectionPlan(
                name=section.name,
                is_block=section_class.is_block,
                recompute=recompute,
                units=group_units(section_class, choices),
            )
        )
    return tuple(sections)


def plans_for(profile):
    """Name -> plan; all take the same global batch."""
    per_rank = GLOBAL_BATCH // profile.num_ranks
    decisions = {
        "DP": (uniform_sections(profile, DP, "none"), 1),
        "ZeRO-2, recomputed": (uniform_sections(profile, ZERO2, "full"), 2),
        "ZeRO-3, accumulated": (uniform_sections(profile, ZERO3, "none"), 2),
        "mixed": (mixed_sections(profile), 1),
        "mixed, accumulated": (mixed_sections(profile), per_rank),
    }
    if len(profile.ranks_per_node) > 1:
        decisions["HSDP"] = (uniform_sections(profile, HSDP, "full"), 1)
        decisions["random"] = (random_sections(profile, random.Random(5)), 2)
    return {
        name: make_plan(profile, sections, micro_batch=per_rank // accumulation, accumulation=accumulation)
        for name, (sections, accumulation) in decisions.items()
    }


def train(work, model, *, rank, num_ranks, micro_batch, accumulation, clip):
    """(loss over the global batch, gradient norm) of every step."""
    optimizer = work.build_optimizer(model.parameters())
    batches = work.build_batches(rank, num_ranks, micro_batch, SEED, 0)
    curve = []
    for _ in range(NUM_STEPS):
        total = 0.0
        for _ in range(accumulation):
            loss = work.loss(model, next(batches))
            (loss / accumulation).backward()
            total += loss.item() / accumulation
        norm = clip(list(model.parameters()), MAX_NORM).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = torch.tensor(total, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= num_ranks
        curve.append((mean.item(), norm))
    return curve


def plain_curve(work):
    """The same steps in one process by torch alone: its own clipping, one batch, nothing sharded."""
    model, initialisation = build_on_meta(work)
    initialisation.materialize(model, "cpu", SEED)
    return train(
        work,
        model,
        rank=0,
        num_ranks=1,
        micro_batch=GLOBAL_BATCH,
        accumulation=1,
        clip=torch.nn.utils.clip_grad_norm_,
    )


def cases(data, ranks_per_node):
    """(name, whether tied, plan): all plans for the plain model, those of mixed modes for the tied one too."""
    found = []
    for tied in (False, True):
        work = workload(data, tied=tied)
        profile = traced_profile(work, trace(work), ranks_per_node=ranks_per_node)
        for name, plan in plans_for(profile).items():
            if not tied or name.startswith(("mixed", "random")):
                found.append((f"{name}{', tied' if tied else ''}", tied, plan))
    return found


def run_rank(rank, num_ranks, port, data, planned, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    curves = {}
    for name, tied, plan in planned:
        work = workload(data, tied=tied)
        model, initialisation = build_on_meta(work)
        parallelize(model, plan, device_type="cpu")
        initialisation.materialize(model, "cpu", SEED)
        curves[name] = train(
            work,
            model,
            rank=rank,
            num_ranks=num_ranks,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            clip=clip_grad_norm,
        )
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(curves, file)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_bytes(b"the cat sat on the mat and the dog ate the fat rat. " * 300)
    return str(path)


@pytest.fixture(scope="module")
def plain(corpus):
    return {tied: plain_curve(workload(corpus, tied=tied)) for tied in (False, True)}


@pytest.mark.parametrize("ranks_per_node", [(2,), (2, 2)], ids=["2 ranks", "2 nodes of 2 ranks"])
def test_every_plan_gives_the_losses_and_gradient_norms_of_one_process(corpus, plain, tmp_path, ranks_per_node):
    port = free_port()
    num_ranks, planned = sum(ranks_per_node), cases(corpus, ranks_per_node)

    start_ranks(run_rank, (num_ranks, port, corpus, planned, str(tmp_path)), num_ranks)

    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(curves == by_rank[0] for curves in by_rank), "ranks disagree on the global loss or norm"
    for name, tied, _ in planned:
        for step, (found, wanted) in enumerate(zip(by_rank[0][name], plain[tied], strict=True)):
            assert found[0] == pytest.approx(wanted[0], rel=1e-5), f"{name}: loss of step {step}"
            assert found[1] == pytest.approx(wanted[1], rel=1e-5), f"{name}: gradient norm of step {step}"


def test_the_plain_run_trains_and_clips(plain):
    for curve in plain.values():
        losses, norms = zip(*curve, strict=True)
        assert losses[-1] < losses[0] - 0.1
        assert max(norms) > MAX_NORM


def test_a_plan_for_other_ranks_or_another_model_is_refused(corpus, tmp_path):
    work = workload(corpus)
    profile = traced_profile(work, trace(work), ranks_per_node=(1,))
    other = traced_profile(work, trace(work), ranks_per_node=(2,))
    sections = uniform_sections(profile, ZERO3, "none")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, _ = build_on_meta(work)
        with pytest.raises(PlanMismatchError, match=r"made for ranks 2, and here it is 1\. Plan again"):
            parallelize(model, make_plan(other, sections, micro_batch=1, accumulation=1), device_type="cpu")
        fewer = make_plan(profile, sections[:2] + sections[3:], micro_batch=1, accumulation=1)
        with pytest.raises(PlanMismatchError, match=r"without parameters in 'blocks\.1\.attention\.projection'"):
            parallelize(model, fewer, device_type="cpu")
        model.token_embedding.weight = torch.nn.Parameter(torch.empty(32, 256, device="meta").t())
        with pytest.raises(
            ShardingError, match=r"'token_embedding.*' cannot be sharded: .*contiguous.* Parameters must"
        ):
            parallelize(model, make_plan(profile, sections, micro_batch=1, accumulation=1), device_type="cpu")
        model, _ = build_on_meta(work)
        model.norm = torch.nn.Identity()
        unchecked = dataclasses.replace(
            make_plan(profile, sections, micro_batch=1, accumulation=1), parameter_counts=()
        )
        with pytest.raises(PlanMismatchError, match=r"a model with module 'norm', and here it is not there"):
            parallelize(model, unchecked, device_type="cpu")
        for name, words in (("blocks.1.mlp.up", r"a 'blocks\.1' of"), ("head", "a model of")):
            model, _ = build_on_meta(work)
            found = model.get_submodule(name)
            found.weight = torch.nn.Parameter(torch.empty(7, 3, device="meta"))
            with pytest.raises(PlanMismatchError, match=rf"for {words} [\d,]+ parameters, and here it is [\d,]+"):
                parallelize(model, make_plan(profile, sections, micro_batch=1, accumulation=1), device_type="cpu")
    finally:
        dist.destroy_process_group()
