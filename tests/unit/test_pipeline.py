"""The loop of the pipeline, with fakes for the cluster and the workers: files, events, re-plans, signals, resuming."""

import dataclasses
import json
import os
import signal
import time

import pytest
from ray.exceptions import RayActorError

from osdp_ray import pipeline
from osdp_ray.errors import ClusterError, InfeasibleError, Interrupted, UsageError, WorkerError, WorkerMemoryError
from osdp_ray.execution.failures import translate
from osdp_ray.execution.saves import Save
from osdp_ray.observation import load_parquet
from osdp_ray.records.cluster import Cluster, Device, Node
from osdp_ray.records.plan import Plan, Prediction, SolverReport
from osdp_ray.records.profile import Calibration, OptimizerCost, Profile
from osdp_ray.records.summary import Summary
from osdp_ray.records.telemetry import Sample
from osdp_ray.settings import check_batches
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
        return Profile(
            workload=workload.name,
            workload_hash=workload.hash(),
            device_kind="cpu",
            backend="gloo",
            device_memory_bytes=2000,
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
        )

    def plan(self, profile, *, budget_bytes, global_batch, micro_batch):
        if profile.calibration.peak_offset_bytes and self.candidates:
            candidate = self.candidates.pop(0)
            if isinstance(candidate, Exception):
                raise candidate
            return candidate
        return make_plan(profile, budget_bytes=budget_bytes, micro_batch=micro_batch or 1)

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
        micro_batch=micro_batch,
        accumulation=GLOBAL_BATCH // micro_batch // 2,
        sections=(),
        prediction=prediction(800, samples_per_s),
        alternatives=(),
        solver=SolverReport(solver="hand", status="optimal", gap_fraction=0.0, num_solves=1, num_cuts=0, solve_s=0.0),
    )


@pytest.fixture
def world(monkeypatch):
    world = World()
    for name in ("connect", "discover", "recalibrate", "predict", "execute"):
        monkeypatch.setattr(pipeline, name, getattr(world, name))
    monkeypatch.setattr(pipeline, "make_profile", world.profile)
    monkeypatch.setattr(pipeline, "make_plan", world.plan)
    monkeypatch.setattr(pipeline, "drifted", lambda plan, telemetry: None)
    monkeypatch.setattr(pipeline, "start_hub", lambda run: world.hub)
    monkeypatch.setattr(pipeline, "_POLL_S", 0.005)
    monkeypatch.setattr(pipeline, "_ABORT_WAIT_S", 0.01)
    return world


def run(world, out, *, workload=None, num_steps=6, max_replans=0, **settings):
    settings = {"budget_bytes": BUDGET_BYTES, "global_batch": GLOBAL_BATCH, "on_event": world.on_event} | settings
    return pipeline.run(workload or Tiny(), out=out, num_steps=num_steps, max_replans=max_replans, **settings)


def test_a_run_writes_every_file_and_tells_every_stage(world, tmp_path):
    summary = run(world, tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        *("cluster.json", "profile.json", "plan-0.json", "telemetry.parquet", "metrics.jsonl", "saves", "summary.json")
    }
    assert Summary.load(tmp_path / "run" / "summary.json") == summary
    assert summary.measured_peak_bytes == (800, 801)
    assert summary.measured_step_s == 0.5  # the slower rank, without the first and the profiled steps
    assert summary.samples_per_s == GLOBAL_BATCH / 0.5
    assert (summary.predicted_peak_bytes, summary.num_steps, summary.num_plans, summary.num_restarts) == (800, 6, 1, 0)
    assert (summary.first_loss, summary.final_loss) == (5.0, 5.0 - 0.006)
    stages = [facts["name"] for kind, facts in world.events if kind == "stage" and facts["seconds"] is None]
    assert stages == ["discover", "profile", "plan", "train"]
    assert world.kinds()[-1] == "done"
    assert set(summary.stage_s) == set(stages)


def test_metrics_have_a_line_per_step_with_the_peak_of_each_rank(world, tmp_path):
    run(world, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[1]["peak_bytes"] == [800, 801]
    assert lines[3] == {
        "plan_index": 0,
        "step": 4,
        "loss": 5.0 - 0.004,
        "gradient_norm": None,
        "learning_rate": 0.1,
        "step_s": 0.5,
        "samples_per_s": 8.0,
        "peak_bytes": None,
    }


def test_the_budget_is_nine_tenths_of_the_smallest_device_by_default(world, tmp_path):
    assert run(world, tmp_path, budget_bytes=None).budget_bytes == 1800


def test_a_peak_above_the_budget_is_replanned_from_the_save_of_that_step(world, tmp_path):
    world.recalibrated_peak_bytes = BUDGET_BYTES + 1
    world.candidates = [make_plan(world.profile(Tiny(), world.discover(num_workers=2)), micro_batch=2)]
    summary = run(world, tmp_path, num_steps=200, max_replans=2)
    (first, second) = world.attempts
    assert first == (0, 0)
    assert second[0] == 1
    assert 3 <= second[1] < 200
    assert (summary.num_plans, summary.num_restarts, summary.num_steps, summary.micro_batch) == (2, 1, 200, 2)
    assert Plan.load(tmp_path / "plan-1.json").micro_batch == 2
    assert [s.step for s in load_parquet(tmp_path / "telemetry.parquet").samples if s.rank == 0] == [*range(1, 201)]
    (replan,) = [facts for kind, facts in world.events if kind == "replan"]
    assert replan["reason"] == "the peak is 1001 B, above 1000 B"


def test_a_faster_plan_is_taken_only_where_the_rest_of_the_run_pays_for_the_restart(world, tmp_path):
    profile = world.profile(Tiny(), world.discover(num_workers=2))
    faster = make_plan(profile, micro_batch=2, samples_per_s=110.0)
    world.candidates = [faster]
    assert run(world, tmp_path / "long", num_steps=100, max_replans=1).num_restarts == 1
    world.candidates = [faster]
    world.step_s = 0.05  # the set-up takes as long as many steps, and few are left
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "measured_step_s", lambda samples, device_kind: 0.001)
        assert run(world, tmp_path / "short", num_steps=8, max_replans=1).num_restarts == 0


@pytest.mark.parametrize(
    "candidate",
    ["same", "slightly faster", InfeasibleError(BUDGET_BYTES, 2000, "loss", "head")],
    ids=["same decisions", "1 % faster", "infeasible"],
)
def test_a_replan_that_is_not_better_keeps_the_running_plan(world, tmp_path, caplog, candidate):
    profile = world.profile(Tiny(), world.discover(num_workers=2))
    if candidate == "same":
        world.recalibrated_peak_bytes = BUDGET_BYTES + 1
        candidate = make_plan(profile)
    elif candidate == "slightly faster":
        candidate = make_plan(profile, micro_batch=2, samples_per_s=101.0)
    world.candidates = [candidate]
    summary = run(world, tmp_path, num_steps=60, max_replans=2)
    assert (summary.num_plans, summary.num_restarts) == (1, 0)
    assert world.candidates == []  # it was asked for, once
    assert ("the running plan stays" in caplog.text) == isinstance(candidate, InfeasibleError)


def test_replans_are_bounded_and_never_return_to_an_earlier_plan(world, tmp_path):
    profile = world.profile(Tiny(), world.discover(num_workers=2))
    world.recalibrated_peak_bytes = BUDGET_BYTES + 1
    world.candidates = [make_plan(profile, micro_batch=2), make_plan(profile, micro_batch=1)]
    summary = run(world, tmp_path, num_steps=200, max_replans=9)
    assert summary.num_plans == 2
    assert world.candidates == []


def interrupt(world, number, at_step):
    def on_event(kind, facts):
        world.on_event(kind, facts)
        if kind == "samples" and facts["samples"][-1].step >= at_step and world.hub.command == "":
            os.kill(os.getpid(), number)

    return on_event


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_goes_on_at_the_next_step(world, tmp_path, number):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=rf"signal {int(number)} after step \d+; go on with --resume") as caught:
        run(world, tmp_path, num_steps=100_000, on_event=interrupt(world, number, 5))
    stopped_at = caught.value.step
    assert stopped_at >= 5
    assert signal.getsignal(signal.SIGTERM) is before
    assert load_parquet(tmp_path / "telemetry.parquet").samples[-1].step == stopped_at
    assert not (tmp_path / "summary.json").exists()

    summary = run(world, tmp_path, num_steps=stopped_at + 7, resume=True)
    assert world.attempts == [(0, 0), (0, stopped_at)]
    assert summary.num_steps == stopped_at + 7
    assert world.kinds().count("profile") == 1  # the same world keeps its plan
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, stopped_at + 8)]


def test_a_second_signal_ends_the_run_at_once(world, tmp_path):
    def on_event(kind, facts):
        if kind == "samples":
            os.kill(os.getpid(), signal.SIGINT)

    world.hub.set_command = lambda command: None  # these workers never hear of a stop
    with pytest.raises(Interrupted, match=r"before anything was saved"):
        run(world, tmp_path, num_steps=2000, on_event=on_event)
    assert world.hub.killed


def test_a_signal_before_training_ends_at_once(world, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "make_profile", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="signal 15 before anything was saved"):
        run(world, tmp_path)
    assert world.attempts == []


def test_a_failed_worker_ends_the_run_with_its_error_and_keeps_the_telemetry(world, tmp_path):
    world.fails_at = 4
    with pytest.raises(WorkerError, match="worker 1 failed: boom"):
        run(world, tmp_path)
    assert load_parquet(tmp_path / "telemetry.parquet").samples[-1].step == 3


def lost_cluster():
    raise RayActorError(error_msg="the node has crashed")


def test_a_lost_cluster_is_named_with_the_way_to_go_on(world, tmp_path):
    world.hub.drain = lost_cluster
    with pytest.raises(ClusterError, match=r"the Ray cluster was lost \(the node has crashed\).*go on by --resume"):
        run(world, tmp_path)


def test_a_signal_that_also_ends_the_embedded_ray_counts_as_an_interrupt(world, tmp_path):
    def on_event(kind, facts):
        if kind == "samples":
            world.hub.drain = lost_cluster
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="signal 15"):
        run(world, tmp_path, num_steps=2000, on_event=on_event)


def test_another_world_is_planned_anew_and_goes_on_from_the_save(world, tmp_path):
    with pytest.raises(Interrupted) as caught:
        run(world, tmp_path, num_steps=100_000, on_event=interrupt(world, signal.SIGINT, 5))
    world.num_ranks = 4
    summary = run(world, tmp_path, num_steps=caught.value.step + 5, resume=True, budget_bytes=None)
    assert summary.budget_bytes == BUDGET_BYTES  # the run's own, not the default
    assert world.attempts[-1] == (1, caught.value.step)
    assert (summary.num_ranks, summary.num_plans) == (4, 2)


def test_a_run_without_saves_resumes_from_the_start(world, tmp_path):
    world.fails_at = 2
    with pytest.raises(WorkerError):
        run(world, tmp_path)
    world.fails_at = None
    assert run(world, tmp_path, resume=True).num_steps == 6
    assert world.attempts == [(0, 0), (0, 0)]


def test_a_directory_that_holds_another_run_is_refused(world, tmp_path):
    run(world, tmp_path)
    with pytest.raises(UsageError, match=r"holds another run\. Go on with it by --resume, or give another --out"):
        run(world, tmp_path)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, r"is complete: 6 of 6 steps are done\. Raise --steps"),
        ({"num_steps": 9, "seed": 1}, r"has --seed 0, not 1\. Give --seed 0"),
        ({"num_steps": 9, "global_batch": 8}, r"has --global-batch 4, not 8\. Give --global-batch 4"),
        ({"num_steps": 9, "workload": Tiny(2)}, r"holds a run of workload 'tiny' with hash .*give another --out"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(world, tmp_path, settings, remedy):
    run(world, tmp_path)
    with pytest.raises(UsageError, match=remedy):
        run(world, tmp_path, resume=True, **settings)
    assert len(world.attempts) == 1


def test_there_must_be_a_run_to_resume(world, tmp_path):
    with pytest.raises(UsageError, match=r"holds no run to go on with\. Leave --resume out"):
        run(world, tmp_path, resume=True)


def test_out_must_be_a_folder(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"is a file, and a run needs a folder\. Give another --out"):
        run(world, tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot be made .*Give another --out"):
        run(world, tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"global_batch": 10, "num_workers": 4},
            r"of 10 cannot be divided by 4 workers = 4\. Give --global-batch 8 or 12",
        ),
        (
            {"global_batch": 4, "num_workers": 2, "micro_batch": 3},
            r"2 workers x micro-batch 3 = 6\. Give --global-batch 6,",
        ),
        ({"global_batch": 3}, r"of 3 cannot be divided by 2 workers"),  # known only once the cluster is
        ({"num_steps": 0}, r"--steps is 0, and at least 1 is needed"),
        ({"save_every": -1}, r"--save-every is -1, and at least 0 is needed"),
        ({"num_workers": 0}, r"--num-workers is 0, and at least 1 is needed"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_flag(world, tmp_path, settings, remedy):
    with pytest.raises(UsageError, match=remedy):
        run(world, tmp_path, **settings)
    assert world.attempts == []


def test_batches_that_divide_are_taken():
    check_batches(8, 2, None)
    check_batches(8, 2, 4)


class TrainError(Exception):
    """Shaped like Ray Train's WorkerGroupError."""

    def __init__(self, failures):
        super().__init__("failed")
        self.worker_failures = failures


BROKEN = RuntimeError("gloo: Connection closed by peer")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: BROKEN, 1: WorkerError(1, "ValueError: boom", "Mend it")}, "worker 1 failed: ValueError: boom"),
        ({0: BROKEN, 1: WorkerMemoryError(1, "no room", "Lower it")}, "worker 1 ran out of memory: no room. Lower it"),
        ({0: BROKEN, 1: RayActorError(error_msg="killed")}, "worker 1 failed: its process died (killed)"),
        ({0: BROKEN, 2: RayActorError(error_msg="killed, OOM")}, "worker 2 ran out of memory: killed, OOM"),
        ({0: BROKEN, 1: UsageError("Give another --data.")}, "Give another --data."),
    ],
)
def test_the_first_cause_is_shown_not_the_connections_that_broke_with_it(failures, expected):
    assert str(translate(TrainError(failures))).startswith(expected)


def test_a_failure_without_a_rank_is_the_workers():
    assert str(translate(RuntimeError("no placement"))).startswith("the workers failed: no placement. See 'ray status'")
