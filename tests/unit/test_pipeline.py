"""The loop of the pipeline, with fakes for the cluster and the workers: files, events, re-plans, signals, resuming."""

import dataclasses
import json
import os
import signal

import pytest
from ray.exceptions import RayActorError

from osdp_ray import pipeline
from osdp_ray.errors import ClusterError, InfeasibleError, Interrupted, WorkerError
from osdp_ray.execution.saves import Save
from osdp_ray.observation import load_parquet
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile, Section
from osdp_ray.records.summary import Summary
from tests.fake_run import BUDGET_BYTES, GLOBAL_BATCH, Tiny, make_plan, run, sample


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


def test_a_save_that_fails_is_told_counted_and_shown(world, tmp_path, caplog):
    facts = {"step": 3, "problem": "save a: it cannot be written", "seconds": 0.1, "stall_s": 0.1}
    world.hub.items[1].append(("save_failed", facts))
    summary = run(world, tmp_path)
    assert summary.num_failed_saves == 1
    assert "1 saves failed" in summary.table()
    assert ("save_failed", facts) in world.events
    assert "training goes on, and is not saved at step 3: save a: it cannot be written" in caplog.text


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


def test_further_signals_change_nothing_and_leave_nothing_behind(world, tmp_path):
    def on_event(kind, facts):
        if kind == "samples":
            (tmp_path / "ray").mkdir(exist_ok=True)  # Ray Train's, while an attempt runs
            os.kill(os.getpid(), signal.SIGTERM)

    def kill_workers():
        os.kill(os.getpid(), signal.SIGTERM)
        world.hub.killed = True

    world.hub.set_command = lambda command: None  # these workers never hear of a stop
    world.hub.kill_workers = kill_workers
    with pytest.raises(Interrupted, match="signal 15"):
        run(world, tmp_path, num_steps=2000, on_event=on_event)
    assert world.hub.killed
    assert not (tmp_path / "ray").exists()


def test_an_interrupt_that_waiting_on_ray_made_plain_is_told_as_what_it_was(world, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "make_profile", lambda *_: raising(KeyboardInterrupt()))
    with pytest.raises(Interrupted, match="signal 2 before anything was saved"):
        run(world, tmp_path)


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


def test_a_full_disk_does_not_hide_why_a_run_ended(world, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    world.fails_at = 4
    monkeypatch.setattr(pipeline, "save_parquet", full)
    with pytest.raises(WorkerError, match="worker"):
        run(world, tmp_path)


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


def test_after_a_kill_metrics_have_every_step_once_whatever_the_driver_had_not_written(world, tmp_path):
    with pytest.raises(Interrupted) as caught:
        run(world, tmp_path, num_steps=100_000, on_event=interrupt(world, signal.SIGINT, 8))
    step = caught.value.step
    path, save = tmp_path / "metrics.jsonl", tmp_path / "saves" / f"step-{step:08d}" / "save.json"
    samples = tuple(sample(0, rank, at, None) for at in (step - 2, step - 1, step) for rank in (0, 1))
    dataclasses.replace(Save.load(save), samples=samples).save(save)
    written = path.read_text().splitlines()
    # As a kill may leave it: two steps lost, the one before them cut and twice whole, one after the save.
    late = written[-1].replace(f'"step": {step}', f'"step": {step + 1}')
    path.write_text("\n".join([*written[:-3], written[-3][:20], written[-3], written[-3], late]))
    run(world, tmp_path, num_steps=step + 3, resume=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, step + 4)]
    assert [json.dumps(line) for line in lines[: step - 2]] == written[:-2]
    assert lines[step - 1]["loss"] == samples[-1].loss
    assert lines[step - 1]["step_s"] == max(s.step_s for s in samples)


def contents(folder):
    return {path.name: path.read_text() for path in folder.glob("*.json")}


@pytest.mark.parametrize("stage", ["make_profile", "make_plan"])
def test_a_resume_in_another_world_that_ends_before_its_plan_leaves_the_run_as_it_was(
    world, tmp_path, monkeypatch, stage
):
    with pytest.raises(Interrupted) as caught:
        run(world, tmp_path, num_steps=100_000, on_event=interrupt(world, signal.SIGINT, 5))
    before, step = contents(tmp_path), caught.value.step
    world.num_ranks = 1
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, stage, lambda *_, **__: raising(InfeasibleError(10, 2000, "loss", "head")))
        with pytest.raises(InfeasibleError):
            run(world, tmp_path, num_steps=step + 5, resume=True, budget_bytes=10)
    assert contents(tmp_path) == before
    world.num_ranks = 2
    run(world, tmp_path, num_steps=step + 5, resume=True)
    assert world.attempts[-1] == (0, step)  # the first plan, with its own profile


def test_a_resume_measures_again_only_where_the_cluster_is_another_one(world, tmp_path):
    with pytest.raises(Interrupted) as caught:
        run(world, tmp_path, num_steps=100_000, on_event=interrupt(world, signal.SIGINT, 5))
    step = caught.value.step

    run(world, tmp_path, num_steps=step + 3, resume=True, budget_bytes=1234)  # plans again, from what was measured
    assert world.num_profiles == 1
    world.num_ranks = 1
    run(world, tmp_path, num_steps=step + 6, resume=True, budget_bytes=1234)
    assert world.num_profiles == 2


def raising(error):
    raise error


@pytest.mark.parametrize(
    "change",
    [
        {"ranks_per_node": (1,)},
        {"precision": "bf16"},
        {"workload_hash": "other"},
        {"device_kind": "cuda"},
        {"sections": (Section(name="stem", class_index=0),)},
        None,
    ],
    ids=lambda change: "no JSON" if change is None else next(iter(change)),
)
def test_a_profile_that_is_not_the_plans_is_made_anew(world, tmp_path, change):
    world.fails_at = 2
    with pytest.raises(WorkerError):
        run(world, tmp_path)
    world.fails_at = None
    path = tmp_path / "profile.json"
    right = path.read_text()
    if change is None:
        path.write_text("{")
    else:
        dataclasses.replace(Profile.load(path), **change).save(path)
    run(world, tmp_path, resume=True)
    assert world.kinds().count("profile") == 2
    assert world.attempts[-1] == (1, 0)
    assert path.read_text() == right


def test_a_run_without_saves_resumes_from_the_start(world, tmp_path):
    world.fails_at = 2
    with pytest.raises(WorkerError):
        run(world, tmp_path)
    world.fails_at = None
    assert run(world, tmp_path, resume=True).num_steps == 6
    assert world.attempts == [(0, 0), (0, 0)]
