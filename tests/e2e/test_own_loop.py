"""The example of a TorchTrainer loop of one's own trains under a plan, saves, and goes on from its save."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240


def run_job(out, num_steps):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = subprocess.run(
        [sys.executable, "jobs/own_loop.py", "--memory-budget", "6MiB", "--out", str(out), "--steps", str(num_steps)],
        cwd=ROOT,
        env=env | {"RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    steps = re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", found.stdout + found.stderr)
    return {int(step): float(loss) for step, loss, _ in steps}


def test_a_loop_of_ones_own_learns_and_resumes(tmp_path):
    first = run_job(tmp_path / "own", 8)
    more = run_job(tmp_path / "own", 12)

    assert list(first) == list(range(1, 9))
    assert list(more) == [9, 10, 11, 12]
    assert more[12] < first[1] - 0.1
