"""A small GPT through the whole pipeline on one embedded Ray: budgets, worlds, a re-plan, a loop of one's own."""

import dataclasses
import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

from osdp_ray.discovery import connect
from osdp_ray.errors import InfeasibleError
from osdp_ray.observation import load_parquet
from osdp_ray.pipeline import run
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.workloads.gpt import GptWorkload

NUM_STEPS, GLOBAL_BATCH = 12, 8
OWN_LOOP = Path(__file__).resolve().parents[2] / "jobs" / "own_loop.py"


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "text"
    data.write_text("".join(f"{number} squared is {number**2}, and halved {number / 2}\n" for number in range(900)))
    return GptWorkload(layers=3, hidden=64, heads=4, sequence=64, data=str(data), held_out_windows=8)


@pytest.fixture(scope="module", autouse=True)
def embedded_ray():
    import ray

    connect(None, num_workers=4)
    yield
    ray.shutdown()


def train(workload, out, *, num_workers=2, max_replans=0, **settings):
    settings = {"global_batch": GLOBAL_BATCH, "micro_batch": 2, "num_steps": NUM_STEPS} | settings
    return run(workload, out=out, num_workers=num_workers, max_replans=max_replans, **settings)


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def roomy(workload, tmp_path_factory):
    """The run that all others are compared with: two workers, the default budget."""
    out = tmp_path_factory.mktemp("roomy")
    return out, train(workload, out)


@pytest.fixture(scope="module")
def leanest_bytes(roomy):
    plan = Plan.load(roomy[0] / "plan-0.json")
    return min(alternative.peak_bytes for alternative in plan.alternatives)


def assert_within_budget_and_prediction(summary):
    for peak_bytes in summary.measured_peak_bytes:
        assert peak_bytes <= summary.budget_bytes
        assert peak_bytes == pytest.approx(summary.predicted_peak_bytes, rel=0.05)


@pytest.fixture
def measured(roomy, monkeypatch):
    """The roomy run's profile, in the place of measuring again, for as many workers as there are."""

    def profile(workload, cluster):
        return dataclasses.replace(Profile.load(roomy[0] / "profile.json"), ranks_per_node=cluster.ranks_per_node)

    monkeypatch.setattr("osdp_ray.pipeline.make_profile", profile)


def earlier_run(roomy, out, **changes):
    """A run under the roomy plan that has not begun to train, to go on with: saves the time of profiling."""
    for name in ("cluster.json", "profile.json"):
        shutil.copy(roomy[0] / name, out / name)
    dataclasses.replace(Plan.load(roomy[0] / "plan-0.json"), **changes).save(out / "plan-0.json")


def test_a_run_trains_within_its_budget_as_predicted(roomy):
    out, summary = roomy
    assert_within_budget_and_prediction(summary)
    assert summary.final_loss == losses(out)[-1] < summary.first_loss == losses(out)[0]
    assert summary.eval_loss < summary.first_loss
    assert summary.num_steps == len(losses(out)) == NUM_STEPS
    samples = load_parquet(out / "telemetry.parquet").samples
    assert [s.step for s in samples if s.rank == 1] == [*range(1, NUM_STEPS + 1)]
    assert {s.step for s in samples if s.peak_bytes is not None} == {2, 3}
    assert {path.name for path in out.iterdir()} == {
        *("cluster.json", "profile.json", "plan-0.json", "telemetry.parquet", "metrics.jsonl", "saves", "summary.json")
    }


def test_a_tight_budget_gives_another_plan_that_keeps_it_and_the_same_losses(
    workload, roomy, measured, leanest_bytes, tmp_path
):
    summary = train(workload, tmp_path, budget_bytes=int(leanest_bytes * 1.02))

    assert_within_budget_and_prediction(summary)
    assert losses(tmp_path) == pytest.approx(losses(roomy[0]), rel=1e-4)
    assert Plan.load(tmp_path / "plan-0.json").decisions != Plan.load(roomy[0] / "plan-0.json").decisions


def test_a_budget_below_the_leanest_plan_names_the_one_that_would_fit(workload, measured, leanest_bytes, tmp_path):
    with pytest.raises(InfeasibleError, match=r"Raise --memory-budget to at least \d"):
        train(workload, tmp_path, budget_bytes=leanest_bytes // 4)


def test_a_peak_above_the_budget_is_replanned_from_a_save_with_the_same_losses(
    workload, roomy, leanest_bytes, tmp_path
):
    budget_bytes = (leanest_bytes + roomy[1].predicted_peak_bytes) // 2
    earlier_run(roomy, tmp_path, budget_bytes=budget_bytes)
    # Enough steps that the command arrives before the last one, however busy the machine is.
    workload_steps = 150
    events = []
    summary = train(
        workload,
        tmp_path,
        num_steps=workload_steps,
        resume=True,
        max_replans=2,
        on_event=lambda kind, facts: events.append(kind),
    )
    assert "replan" in events
    assert summary.num_plans == summary.num_restarts + 1 >= 2
    assert_within_budget_and_prediction(summary)
    assert summary.num_steps == len(losses(tmp_path)) == workload_steps
    first, second = (Plan.load(tmp_path / f"plan-{index}.json") for index in (0, 1))
    assert second.decisions != first.decisions
    assert all(a > b for a, b in zip(losses(tmp_path)[:100:50], losses(tmp_path)[50:150:50], strict=True))


def test_the_number_of_workers_does_not_change_the_losses(workload, roomy, measured, tmp_path):
    summary = train(workload, tmp_path, num_workers=4)
    assert len(summary.measured_peak_bytes) == 4
    assert_within_budget_and_prediction(summary)
    assert losses(tmp_path) == pytest.approx(losses(roomy[0]), rel=1e-4)


def test_a_loop_of_ones_own_learns_and_resumes(tmp_path, capsys):
    main = runpy.run_path(str(OWN_LOOP))["main"]
    losses_by_step = []
    for num_steps in (8, 12):
        main(["--memory-budget", "6MiB", "--out", str(tmp_path / "own"), "--steps", str(num_steps)])
        steps = re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", capsys.readouterr().out)
        losses_by_step.append({int(step): float(loss) for step, loss, _ in steps})
    first, more = losses_by_step
    assert list(first) == list(range(1, 9))
    assert list(more) == [9, 10, 11, 12]
    assert more[12] < first[1] - 0.1
