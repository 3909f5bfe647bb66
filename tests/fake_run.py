"""A pipeline with fakes for the cluster and the workers; the loop itself is the real one."""

import dataclasses
import time

from osdp_ray import pipeline
from osdp_ray.errors import WorkerError
from osdp_ray.execution.saves import Save
from osdp_ray.records.cluster import Cluster, Device, Node
from osdp_ray.records.plan import Plan, Prediction, SolverReport
from osdp_ray.records.profile import Calibration, OptimizerCost, Profile
from osdp_ray.records.telemetry import Sample
from osdp_ray.workload import Workload

BUDGET_BYTES, GLOBAL_BATCH = 1000, 4
FOREVER = 10**6


class Tiny(Workload):
    name = "tiny"

    def __init__(self, width=1):
        self.width = width

    def settings(self):
        return {"width": self.width}


class FakeHub:
    def __init__(self):
        self.command, self.commands, self.items, self.killed = "", [], ([], []), False

    def set_command(self, command):
        self.command = command
        self.commands.append(command)

    def drain(self):
        items, self.items = self.items, ([], [])
        return items

    def kill_workers(self):
        self.killed = True


class World:
    """What the fakes share: each attempt's workers train `num_ranks` ranks until they are told otherwise."""

    num_ranks, step_s, fails_at = 2, 0.002, None

    def __init__(self):
        self.hub, self.attempts, self.events = FakeHub(), [], []
        self.recalibrated_peak_bytes, self.recalibrated_samples_per_s = 900, 100.0
        self.candidates = []
        self.num_profiles = 0

    def on_event(self, kind, facts):
        self.events.append((kind, facts))

    def kinds(self):
        return [kind for kind, _ in self.events]

    def connect(self, address, *, num_workers):
        pass

    def discover(self, *, num_workers):
        node = Node(node_id="n", address="127.0.0.1", hostname="h", num_cpus=4.0, memory_bytes=10**6)
        devices = tuple(
            Device(node_id="n", index=i, kind="cpu", name="CPU", uuid=str(i), memory_bytes=2000, free_bytes=2000)
            for i in range(self.num_ranks)
        )
        return Cluster(nodes=(node,), devices=devices)

    def profile(self, workload, cluster):
        self.num_profiles += 1
        return Profile(
            workload=workload.name,
            workload_hash=workload.hash(),
            device_kind="cpu",
            backend="gloo",
            device_memory_bytes=2000,
            precision=workload.precision,
            ranks_per_node=cluster.ranks_per_node,
            classes=(),
            sections=(),
            traces=(),
            batch_bytes_per_sample=1,
            buffer_bytes=0,
            optimizer=OptimizerCost(
                state_bytes_per_byte=2.0,
                state_bytes_per_tensor=4,
                step_bytes_per_largest=0.0,
                step_bytes_per_total=0.0,
                step_s_per_byte=0.0,
                step_s_per_tensor=0.0,
            ),
            compute=(),
            links=(),
            copy_bytes_per_s=1.0,
            calibration=Calibration(),
            cluster_hash=cluster.hash(),
        )

    def plan(self, profile, *, budget_bytes, global_batch, micro_batch, prefetch, scatter_group):
        if profile.calibration.peak_offset_bytes and self.candidates:
            candidate = self.candidates.pop(0)
            if isinstance(candidate, Exception):
                raise candidate
            return candidate
        made = make_plan(profile, budget_bytes=budget_bytes, micro_batch=micro_batch or 1)
        return dataclasses.replace(made, prefetch=prefetch or 0, scatter_group=scatter_group)

    def recalibrate(self, profile, plan, telemetry):
        return dataclasses.replace(profile, calibration=Calibration(peak_offset_bytes=1))

    def predict(self, profile, plan):
        return prediction(self.recalibrated_peak_bytes, self.recalibrated_samples_per_s)

    def execute(self, workload, plan, cluster, *, options, run_dir, hub, plan_index, resume_from):
        step = 0 if resume_from is None else int(resume_from.name.removeprefix("step-"))
        self.attempts.append((plan_index, step))
        first = step
        while step < options.num_steps and not hub.command:
            step += 1
            time.sleep(self.step_s)
            if step == self.fails_at:
                raise WorkerError(1, "boom", "Mend it")
            peak_bytes = 800 if step - first in (2, 3) else None
            samples = [sample(plan_index, rank, step, peak_bytes) for rank in range(cluster.num_ranks)]
            hub.items[0].extend(samples)
        status = {"stop": "stopped"}.get(hub.command, hub.command) if step < options.num_steps else "done"
        save = None
        if step:
            save = run_dir / "saves" / f"step-{step:08d}"
            saved(workload, options.seed, step).save(save / "save.json")
        loss = 5.0 - step / 1000
        return {
            "status": status,
            "step": step,
            "save": save and str(save),
            "first_loss": 5.0,
            "final_loss": loss,
            "eval_loss": loss,
        }


def saved(workload, seed, step):
    return Save(
        workload=workload.name,
        workload_hash=workload.hash(),
        step=step,
        num_samples=step * GLOBAL_BATCH,
        seed=seed,
        num_steps=10,
        num_ranks=2,
        global_batch=GLOBAL_BATCH,
        plan_index=0,
        first_loss=5.0,
        final_loss=4.0,
    )


def sample(plan_index, rank, step, peak_bytes):
    return Sample(
        plan_index=plan_index,
        rank=rank,
        step=step,
        loss=5.0 - step / 1000,
        gradient_norm=float("nan"),
        learning_rate=0.1,
        num_samples=GLOBAL_BATCH,
        step_s=9.0 if peak_bytes or step == 1 else 0.25 + rank / 4,
        data_s=0.0,
        forward_s=0.1,
        backward_s=0.1,
        optimizer_s=0.0,
        peak_bytes=peak_bytes and peak_bytes + rank,
        persistent_bytes=500,
        reserved_bytes=None,
        resident_bytes=10**6,
        num_retries=0,
    )


def prediction(peak_bytes, samples_per_s):
    return Prediction(
        peak_bytes=peak_bytes,
        persistent_bytes=500,
        peak_by_phase={"loss": peak_bytes},
        step_s=GLOBAL_BATCH / samples_per_s,
        step_s_by_phase={},
        samples_per_s=samples_per_s,
    )


def make_plan(profile, *, budget_bytes=BUDGET_BYTES, micro_batch=1, samples_per_s=100.0):
    return Plan(
        workload=profile.workload,
        workload_hash=profile.workload_hash,
        ranks_per_node=profile.ranks_per_node,
        budget_bytes=budget_bytes,
        global_batch=GLOBAL_BATCH,
        precision=profile.precision,
        synchronise="every",
        micro_batch=micro_batch,
        accumulation=GLOBAL_BATCH // micro_batch // 2,
        sections=(),
        prediction=prediction(800, samples_per_s),
        alternatives=(),
        solver=SolverReport(solver="hand", status="optimal", gap_fraction=0.0, num_solves=1, num_cuts=0),
        prefetch=profile.default_prefetch,
    )


def run(world, out, *, workload=None, num_steps=6, max_replans=0, **settings):
    settings = {"budget_bytes": BUDGET_BYTES, "global_batch": GLOBAL_BATCH, "on_event": world.on_event} | settings
    return pipeline.run(workload or Tiny(), out=out, num_steps=num_steps, max_replans=max_replans, **settings)
