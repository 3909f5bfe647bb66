"""A measured sweep, as a user starts it: the job, a Ray of its own, two workers, a Tune trial for each budget."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from osdp_ray.records.plan import Plan
from osdp_ray.records.sweep import SweepResult
from osdp_ray.units import KIB, MIB

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "32"]
BATCH = ["--num-workers", "2", "--global-batch", "8", "--micro-batch", "2"]


def test_a_measured_sweep_trains_every_budget_that_fits_under_its_own_plan(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = [*MODEL, *BATCH, "--budgets", "4MiB,800KiB,256KiB", "--measure-steps", "3", "--out", str(out)]

    done = subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "sweep_budgets.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.lstrip().startswith("budget"), "Tune's own output is kept out of the table's"
    result = SweepResult.load(out / "sweep.json")
    unfit, lean, fat = result.rows
    assert [row.budget_bytes for row in result.rows] == [256 * KIB, 800 * KIB, 4 * MIB]
    assert (unfit.fits, unfit.is_measured) == (False, False)
    assert lean.plan_label != fat.plan_label
    runs = sorted((out / "runs").iterdir())
    assert len(runs) == 2
    for row, run in zip((lean, fat), runs, strict=True):
        summary = json.loads((run / "summary.json").read_text("utf-8"))
        assert (summary["num_steps"], summary["num_plans"]) == (3, 1)
        assert row.measured_samples_per_s == summary["samples_per_s"] > 0
        assert row.measured_step_s == summary["measured_step_s"]
        assert row.measured_peak_bytes == max(summary["measured_peak_bytes"])
        assert row.measured_peak_bytes == pytest.approx(row.predicted_peak_bytes, rel=0.1)
        assert Plan.load(run / "plan-0.json").prediction.peak_bytes == row.predicted_peak_bytes
        assert not (run / "saves").exists()
    assert pq.read_table(out / "sweep.parquet").column("measured_peak_bytes").to_pylist() == [
        None,
        lean.measured_peak_bytes,
        fat.measured_peak_bytes,
    ]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tune" / "tuner.pkl").exists(), "Tune's experiment is there to be opened"
