"""Seconds and memory from the command to the first step, by stage, and of planning alone.

`python benchmarks/startup.py`: starts jobs/train_gpt.py for one step in a process of its own and reads the stages from
its summary and the first line of its metrics; `osdp plan` on the profile that this made, again and again.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import machine, parse_flags, spread, write_figures

from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent
JOB = ["jobs/train_gpt.py", "--memory-budget", "24MiB", "--steps", "1", "--max-replans", "0"]


def main() -> None:
    flags = parse_flags(__doc__ or "")
    num_runs = 1 if flags.quick else 3
    size = ["--num-workers", "1", "--layers", "2"] if flags.quick else ["--num-workers", "2"]
    runs = [run_job(size) for _ in range(num_runs)]
    plan_s = [run_plan(runs[0]["profile"]) for _ in range(1 if flags.quick else 7)]
    loaded = run_plan_imports(runs[0]["profile"])
    stages = list(runs[0]["stage_s"])
    rows = [(f"{stage}", spread([run["stage_s"][stage] for run in runs])) for stage in stages]
    rows.append(("command to first step", spread([run["first_step_s"] for run in runs])))
    rows.append(("osdp plan, the whole command", spread(plan_s)))
    print(format_table(("stage", "seconds: median (min to max)"), rows))
    peak_bytes = statistics.median(run["peak_bytes"] for run in runs)
    print(f"\npeak memory of all processes of the job: {format_bytes(peak_bytes)} (sum of proportional set sizes)")
    print(f"modules loaded by osdp plan: torch {loaded['torch']}, ray {loaded['ray']}")
    print(machine())
    write_figures(
        flags.json,
        {
            "seconds_to_first_step": statistics.median(run["first_step_s"] for run in runs),
            "seconds_plan_command": statistics.median(plan_s),
            "seconds_by_stage": {stage: statistics.median(run["stage_s"][stage] for run in runs) for stage in stages},
            "peak_bytes": peak_bytes,
            "num_runs": len(runs),
        },
    )


def run_job(size: list[str]) -> dict:
    """One job of one step: seconds by stage, seconds to the first step's end, peak bytes of its process tree."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        started = time.time()
        process = subprocess.Popen(
            [sys.executable, *JOB, *size, "--out", str(out)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        peak = PeakMemory(process.pid)
        with peak:
            _, errors = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"the job failed with {process.returncode}:\n{errors}")
        summary = json.loads((out / "summary.json").read_text())
        first = (out / "metrics.jsonl").stat()
        profile = (out / "profile.json").read_text()
        return {
            "stage_s": summary["stage_s"],
            "first_step_s": first.st_mtime - started,
            "peak_bytes": peak.bytes,
            "profile": profile,
        }


def run_plan(profile: str) -> float:
    """Seconds of one `osdp plan` as a whole process."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(profile)
        file.flush()
        started = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "osdp_ray.cli",
                "plan",
                file.name,
                "--memory-budget",
                "24MiB",
                "--global-batch",
                "16",
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return time.perf_counter() - started


def run_plan_imports(profile: str) -> dict[str, bool]:
    """Whether planning loads torch or ray."""
    code = (
        "import json, sys; from osdp_ray.cli import main; main(sys.argv[1:]); "
        "sys.stderr.write(json.dumps({name: name in sys.modules for name in ('torch', 'ray')}))"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(profile)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", file.name, "--memory-budget", "24MiB", "--global-batch", "16"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    return json.loads(done.stderr)


class PeakMemory:
    """Watches a process and its descendants, every half second, while the context is open."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid, self._done = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            self.bytes = max(self.bytes, sum(map(proportional_bytes, family(self._pid))))


def family(pid: int) -> list[int]:
    """A process and its descendants, from /proc."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def proportional_bytes(pid: int) -> int:
    """Proportional set size: pages that several processes share count once in all."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


if __name__ == "__main__":
    main()
