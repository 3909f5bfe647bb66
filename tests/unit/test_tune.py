"""The sweep over memory budgets, planned from a profile: rows, files, the picture, the job and its bad input."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import sweep_budgets
from osdp_ray.errors import SweepInterrupted, UsageError, WorkerError
from osdp_ray.planning import plan
from osdp_ray.profiling.trace import trace
from osdp_ray.records.profile import Profile
from osdp_ray.records.sweep import SweepResult, SweepRow
from osdp_ray.reporting.sweep import plot
from osdp_ray.tune import _faster, plan_label, sweep
from osdp_ray.units import KIB, MIB
from osdp_ray.workloads.gpt import gpt
from tests.oracle import traced_profile

BUDGETS_BYTES = (400 * KIB, 5 * MIB, 700 * KIB, MIB, 700 * KIB)  # neither in order nor unique


@pytest.fixture(scope="module")
def profile() -> Profile:
    workload = gpt(layers=2, hidden=32, heads=2, sequence=32)
    return traced_profile(workload, trace(workload), ranks_per_node=(2,))


@pytest.fixture(scope="module")
def profile_file(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    return path


@pytest.fixture(scope="module")
def result(profile: Profile) -> SweepResult:
    return sweep(profile, BUDGETS_BYTES, global_batch=8, micro_batch=2)


@pytest.fixture
def measured(result: SweepResult) -> SweepResult:
    """The same sweep with what a trial would have added: one measurement and one failure."""
    rows = list(result.rows)
    rows[1] = dataclasses.replace(rows[1], measured_problem="worker 1 ran out of memory: no. Lower --memory-budget")
    rows[2] = dataclasses.replace(
        rows[2], measured_peak_bytes=900 * KIB, measured_step_s=0.1, measured_samples_per_s=87.6
    )
    return dataclasses.replace(result, measure_steps=3, rows=tuple(rows))


def test_rows_ascend_without_duplicates(result: SweepResult) -> None:
    assert [row.budget_bytes for row in result.rows] == sorted(set(BUDGETS_BYTES))


def test_a_larger_budget_is_never_slower_and_every_peak_fits_its_budget(result: SweepResult) -> None:
    speeds = [row.predicted_samples_per_s for row in result.rows if row.fits]

    assert len(speeds) == 3
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[-1]
    assert all(row.predicted_peak_bytes <= row.budget_bytes for row in result.rows if row.fits)


def test_rows_hold_what_the_plan_of_their_budget_says(result: SweepResult, profile: Profile) -> None:
    row = result.rows[2]

    expected = plan(profile, budget_bytes=row.budget_bytes, global_batch=8, micro_batch=2)

    assert (row.global_batch, row.micro_batch, row.accumulation) == (8, 2, 2)
    assert row.predicted_samples_per_s == expected.prediction.samples_per_s
    assert row.predicted_step_s == expected.prediction.step_s
    assert row.predicted_peak_bytes == expected.prediction.peak_bytes
    uniform = {one.name: one.samples_per_s for one in expected.alternatives if one.samples_per_s is not None}
    assert row.best_uniform_samples_per_s == max(uniform.values()) == uniform[row.best_uniform]


def test_a_budget_that_nothing_fits_names_the_smallest_one_that_does(result: SweepResult, profile: Profile) -> None:
    unfit = result.rows[0]

    assert not unfit.fits
    assert unfit.predicted_samples_per_s is None
    assert unfit.budget_bytes < unfit.smallest_budget_bytes <= result.rows[1].budget_bytes
    again = sweep(profile, [unfit.budget_bytes, unfit.smallest_budget_bytes], global_batch=8, micro_batch=2)
    assert [row.fits for row in again.rows] == [False, True]


def test_the_smallest_budget_is_never_above_one_that_fits(profile: Profile, result: SweepResult) -> None:
    smallest_bytes = result.rows[0].smallest_budget_bytes
    budgets_bytes = [smallest_bytes * percent // 100 for percent in (95, 100)]

    rows = sweep(profile, budgets_bytes, global_batch=8, micro_batch=2).rows

    least_bytes = min(row.budget_bytes for row in rows if row.fits)
    assert all(row.budget_bytes < row.smallest_budget_bytes <= least_bytes for row in rows if not row.fits)


def test_a_sweep_in_which_nothing_fits_is_a_result_that_can_be_shown(profile: Profile, tmp_path: Path) -> None:
    nothing = sweep(profile, [KIB], global_batch=8, micro_batch=2)

    plot(nothing, tmp_path / "sweep.png")

    assert "does not fit" in nothing.table()
    assert _is_picture(tmp_path / "sweep.png")


def test_where_the_solver_finds_worse_the_plan_of_the_smaller_budget_stays(profile: Profile) -> None:
    lean, fat = (plan(profile, budget_bytes=size, global_batch=8, micro_batch=2) for size in (700 * KIB, 5 * MIB))

    kept = _faster(dataclasses.replace(lean, budget_bytes=9 * MIB), fat)

    assert kept.decisions == fat.decisions
    assert (kept.budget_bytes, kept.solver.status) == (9 * MIB, "feasible")
    assert _faster(fat, lean) is fat


def test_the_label_says_what_a_plan_does(profile: Profile, result: SweepResult) -> None:
    fat = plan(profile, budget_bytes=5 * MIB, global_batch=8, micro_batch=2)
    first, second, *_ = [section for section in fat.sections if section.is_block]
    sections = tuple(
        dataclasses.replace(section, recompute="full") if section is first else section for section in fat.sections
    )

    assert plan_label(fat) == result.rows[-1].plan_label == f"all {second.label}"
    mixed = plan_label(dataclasses.replace(fat, sections=sections))
    assert f"1 block {second.label}, recompute full; 1 block {second.label}" in mixed


def test_json_and_parquet_give_back_every_row(measured: SweepResult, tmp_path: Path) -> None:
    measured.save(tmp_path / "sweep.json")
    measured.save_parquet(tmp_path / "deeper" / "sweep.parquet")

    assert SweepResult.load(tmp_path / "sweep.json") == measured
    table = pq.read_table(tmp_path / "deeper" / "sweep.parquet")
    assert tuple(SweepRow(**row) for row in table.to_pylist()) == measured.rows
    assert {field.name for field in dataclasses.fields(SweepRow)} == set(table.column_names)


def test_the_table_shows_measurements_and_failures_only_where_there_are_some(
    result: SweepResult, measured: SweepResult
) -> None:
    assert "measured" not in result.table()
    table = measured.table()
    assert "87.6" in table
    assert "700.00 KiB could not be measured: worker 1 ran out of memory" in table
    assert "the smallest budget that fits is" in table


def test_the_plot_is_a_png(measured: SweepResult, tmp_path: Path) -> None:
    plot(measured, tmp_path / "new" / "sweep.png")

    assert _is_picture(tmp_path / "new" / "sweep.png")


def test_the_plot_without_matplotlib_says_what_to_install(
    result: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(UsageError, match=r"pip install 'osdp-ray\[plot\]'"):
        plot(result, tmp_path / "sweep.png")


def test_a_profile_cannot_be_measured_nor_moved_to_other_workers(profile: Profile) -> None:
    with pytest.raises(UsageError, match="leave --measure-steps out"):
        sweep(profile, [MIB], measure_steps=3)
    with pytest.raises(UsageError, match=r"measured on 2 workers, and --num-workers is 3.*profile anew on 3"):
        sweep(profile, [MIB], num_workers=3)


def test_an_interrupted_sweep_says_how_far_it_came_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(SweepInterrupted(15, 4, 1, "out/sweep.json")))

    assert str(error) == (
        "the sweep was stopped by signal 15 with 4 budgets planned and 1 measured. "
        "They are in out/sweep.json; sweep the other budgets anew."
    )
    assert "Start it again" in str(SweepInterrupted(2, 0, 0, ""))


def test_a_failed_trial_is_told_in_one_line_by_the_error_that_the_run_raised() -> None:
    from osdp_ray.tune_cells import _problem

    lost = WorkerError(1, "its node went away", "Start again")
    wrapped = RuntimeError("a page of\ntraceback")
    wrapped.cause = lost

    assert _problem(wrapped) == str(lost)
    assert _problem(RuntimeError("a page of\ntraceback")) == "RuntimeError: traceback"
    assert _problem("a page of\ntext\n") == "text"
    assert _problem(None) == "the trial failed and left no error behind"


def test_sweeping_a_profile_loads_neither_ray_nor_torch() -> None:
    code = "import sys, osdp_ray.tune; sys.exit(any(name in sys.modules for name in ('ray', 'torch')))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_job_writes_table_parquet_and_picture(
    profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--profile", str(profile_file), "--global-batch", "8", "--micro-batch", "2", "--out", str(out)]

    code = sweep_budgets.main([*words, "--from", "400KiB", "--to", "2MiB", "--points", "3"])

    assert code == 0
    rows = SweepResult.load(out / "sweep.json").rows
    assert [row.budget_bytes for row in rows] == [400 * KIB, 1224 * KIB, 2 * MIB]
    assert pq.read_table(out / "sweep.parquet").num_rows == 3
    assert _is_picture(out / "sweep.png")
    assert "1.20 MiB" in capsys.readouterr().out

    assert sweep_budgets.main([*words, "--budgets", "1MiB"]) == 2
    assert "holds another sweep. Give another --out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budgets", "16"], "--budgets: '16' is no size with a unit; write it like 300MiB or 16GiB."),
        (["--budgets", "1MiB,16Mb/s"], "'16Mb/s' is no size with a unit"),
        (["--budgets", ","], "a sweep of no budgets has nothing to do. Give --budgets at least one size"),
        (["--budgets", "0MiB"], "--budgets is 0, and at least 1 is needed."),
        ([], "no budgets are given. Use --budgets 16MiB,24MiB,32MiB, or --from 16MiB --to 64MiB"),
        (["--from", "16MiB"], "no budgets are given"),
        (["--from", "16MiB", "--to", "16MiB"], "--from is 16.00 MiB and --to 16.00 MiB: there is nothing between."),
        (["--from", "32MiB", "--to", "16MiB"], "Give --to a larger size than --from."),
        (["--from", "16MiB", "--to", "32MiB", "--points", "1"], "--points is 1, and at least 2 are needed"),
        (["--budgets", "1MiB", "--points", "3"], "--budgets is a list, and --from, --to and --points make another."),
        (["--budgets", "1MiB", "--layers", "3", "--seq", "8"], "--layers, --seq describes another"),
        (["--budgets", "1MiB", "--measure-steps", "2"], "--measure-steps trains the model"),
        (["--budgets", "1MiB", "--measure-steps", "-1"], "--measure-steps is -1, and at least 0 is needed."),
        (["--budgets", "1MiB", "--global-batch", "7"], "a global batch of 7 cannot be divided by 2 workers"),
    ],
)
def test_the_job_refuses_bad_input_in_one_line_with_the_remedy(
    words: list[str], message: str, profile_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = sweep_budgets.main(["--profile", str(profile_file), *words])

    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_the_job_refuses_a_profile_that_is_not_there_or_is_none(
    tmp_path: Path, result: SweepResult, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, foreign = tmp_path / "none.json", tmp_path / "sweep.json"
    result.save(foreign)

    assert sweep_budgets.main(["--profile", str(missing), "--budgets", "1MiB"]) == 2
    assert f"{missing}: it cannot be read (No such file or directory)" in capsys.readouterr().err
    assert sweep_budgets.main(["--profile", str(foreign), "--budgets", "1MiB"]) == 2
    assert "this is a record of kind 'sweep', and a 'profile' is needed" in capsys.readouterr().err


def _is_picture(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(b"\x89PNG\r\n\x1a\n") and 10_000 < len(content) < 500_000
