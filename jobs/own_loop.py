"""A TorchTrainer loop of one's own under a plan: `python jobs/own_loop.py --memory-budget 8MiB --out runs/own`.

What the loop takes of osdp_ray: the model built shard by shard, the plan applied to it, the norm of gradients over all
ranks, saves that any plan and number of ranks can read. All else is its own: data, schedule, logging, when to stop.
Run it again with the same --out and it goes on from its newest save, with the profile that it made.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SEED = 0


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Runs on every worker; Ray Train has made the process group, and hands on what the first rank returns."""
    import ray.train
    import ray.train.torch
    import torch.distributed as dist

    from osdp_ray import Plan, parallelize
    from osdp_ray.execution import build_on_meta, clip_grad_norm, latest_save, load, save
    from osdp_ray.execution.saves import Save

    workload, plan, out = config["workload"], Plan.from_json(config["plan"]), config["out"]
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), ray.train.torch.get_device()
    model, initialisation = build_on_meta(workload)  # nothing is allocated
    parallelize(model, plan, device_type=device.type)
    initialisation.materialize(model, device, SEED)  # this rank's shards alone
    optimizer = workload.build_optimizer(model.parameters())

    step = 0
    if (newest := latest_save(out)) is not None:
        step = load(newest, model, optimizer, workload_hash=workload.hash()).step
    start = step * plan.accumulation
    batches = workload.build_batches(rank, num_ranks, plan.micro_batch, SEED, start)
    loss_sum, lines = None, []
    while step < config["num_steps"]:
        for number in range(1, plan.accumulation + 1):
            if plan.synchronise == "last":
                model.set_requires_gradient_sync(number == plan.accumulation)
            batch = tuple(part.to(device) for part in next(batches))
            loss = workload.loss(model, batch)
            (loss / plan.accumulation).backward()
            loss_sum = loss.detach() if number == 1 else loss_sum + loss.detach()
        norm = clip_grad_norm(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        dist.all_reduce(loss_sum)
        mean = loss_sum.item() / plan.accumulation / num_ranks
        lines.append(f"step {step}: loss {mean:.4f}, gradient norm {norm.item():.3f}")
    facts = Save(
        workload=workload.name,
        workload_hash=workload.hash(),
        step=step,
        num_samples=step * plan.global_batch,
        seed=SEED,
        num_steps=config["num_steps"],
        num_ranks=num_ranks,
        global_batch=plan.global_batch,
        plan_index=0,
        first_loss=None,
        final_loss=None,
    )
    path = save(out, facts, model, optimizer)
    return {"lines": lines, "saved": str(path)}


def main(arguments: list[str] | None = None) -> None:
    """Discovers, profiles and plans, then leaves the rest to Ray Train."""
    parser = argparse.ArgumentParser(description="Train a GPT in a TorchTrainer loop of one's own.")
    parser.add_argument("--memory-budget", required=True, help="per device, with a unit: 8MiB")
    parser.add_argument("--out", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=8)
    options = parser.parse_args(arguments)

    import ray.train
    from ray.train.torch import TorchTrainer

    import osdp_ray
    from osdp_ray.discovery import connect
    from osdp_ray.units import parse_bytes
    from osdp_ray.workloads.gpt import gpt

    connect(os.environ.get("RAY_ADDRESS"), num_workers=options.num_workers)
    workload = gpt(layers=3, hidden=64, heads=4, sequence=64)
    cluster = osdp_ray.discover(num_workers=options.num_workers)
    kept = options.out / "profile.json"
    profile = osdp_ray.Profile.load(kept) if kept.exists() else None
    if profile is None or (profile.workload_hash, profile.cluster_hash) != (workload.hash(), cluster.hash()):
        profile = osdp_ray.profile(workload, cluster)
        options.out.mkdir(parents=True, exist_ok=True)
        profile.save(kept)
    budget_bytes = parse_bytes(options.memory_budget)
    plan = osdp_ray.plan(profile, budget_bytes=budget_bytes, global_batch=options.global_batch)
    print(plan.table(), flush=True)
    on_gpus = cluster.device_kind == "cuda"
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "workload": workload,
            "plan": plan.to_json(),
            "num_steps": options.steps,
            "out": str(options.out.resolve()),
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=cluster.num_ranks,
            use_gpu=on_gpus,
            resources_per_worker={"GPU": 1} if on_gpus else {"CPU": 1},
            label_selector=[{"ray.io/node-id": device.node_id} for device in cluster.devices],  # ranks as planned for
        ),
        run_config=ray.train.RunConfig(storage_path=str(options.out.resolve() / "ray")),
    )
    found = trainer.fit().return_value
    print("\n".join(found["lines"]))
    print(f"saved to {found['saved']}")


if __name__ == "__main__":
    main()
