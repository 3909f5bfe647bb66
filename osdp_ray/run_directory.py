"""The files of one run: cluster, profile, plan-0, plan-1, ... and summary as JSON, telemetry, metrics.jsonl, saves/.

metrics.jsonl gets a line per step while the run goes on; everything else is written whole or not at all.
"""

import json
import math
import os
import re
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osdp_ray.errors import UsageError
from osdp_ray.execution.options import RAY_FOLDER
from osdp_ray.records.plan import Plan
from osdp_ray.records.summary import Summary
from osdp_ray.records.telemetry import Sample

_PLAN_FILE = re.compile(r"plan-(\d+)\.json")


class RunDirectory:
    """The directory of a run; made if it is not there. Raises UsageError where it cannot hold one."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.path = Path(out).resolve()
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file, and a run needs a folder. Give another --out.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made ({error.strerror}). Give another --out.") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UsageError(f"{self.path} cannot be written to. Give another --out, or mend its permissions.")

    def plan_paths(self) -> list[Path]:
        """The plan files, in the order in which they were made."""
        found = [(int(match[1]), path) for path in self.path.iterdir() if (match := _PLAN_FILE.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    @property
    def holds_run(self) -> bool:
        return bool(self.plan_paths()) or (self.path / "summary.json").exists() or any(self.path.glob("saves/step-*"))

    def require_new(self) -> None:
        """Raises UsageError if there is a run here already."""
        if self.holds_run:
            raise UsageError(f"{self.path} holds another run. Go on with it by --resume, or give another --out.")

    def newest_plan(self) -> tuple[int, Plan]:
        """Number and record of the newest plan. Raises UsageError where there is no run."""
        paths = self.plan_paths()
        if not paths:
            raise UsageError(f"{self.path} holds no run to go on with. Leave --resume out, or give the --out of a run.")
        return int(_PLAN_FILE.fullmatch(paths[-1].name)[1]), Plan.load(paths[-1])  # type: ignore[index]

    def drop_bookkeeping(self) -> None:
        """Removes what Ray Train keeps there while an attempt runs, where one was cut short."""
        shutil.rmtree(self.path / RAY_FOLDER, ignore_errors=True)

    def plan_path(self, index: int) -> Path:
        return self.path / f"plan-{index}.json"


class MetricsFile:
    """metrics.jsonl: one line per step, once all ranks have reported it, in the order of steps."""

    def __init__(
        self, path: Path, *, num_ranks: int, keep_up_to_step: int = 0, samples_of_save: Sequence[Sample] = ()
    ) -> None:
        """Goes on with the lines up to the step of a save: each once, later ones dropped, those that a killed run could
        not write any more made from the samples in the save."""
        kept: dict[float, str] = {}
        if path.exists() and keep_up_to_step > 0:
            kept = {_step_of(line): line for line in path.read_text("utf-8").splitlines()}
        by_step: dict[int, list[Sample]] = {}
        for sample in samples_of_save:
            by_step.setdefault(sample.step, []).append(sample)
        kept = {step: _line(samples) for step, samples in by_step.items()} | kept
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._file.writelines(f"{kept[step]}\n" for step in sorted(kept) if step <= keep_up_to_step)
        self._file.flush()
        self._num_ranks = num_ranks
        self._open_steps: dict[int, list[Sample]] = {}

    def add(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._open_steps.setdefault(sample.step, []).append(sample)
        for step in sorted(self._open_steps):
            if len(self._open_steps[step]) < self._num_ranks:
                break
            self._file.write(f"{_line(self._open_steps.pop(step))}\n")
        self._file.flush()

    def close(self) -> None:
        """Writes the steps that not every rank reported, and closes the file."""
        for step in sorted(self._open_steps):
            self._file.write(f"{_line(self._open_steps.pop(step))}\n")
        self._file.close()


def _line(samples: Sequence[Sample]) -> str:
    """The line of one step, from the samples of its ranks."""
    first = min(samples, key=lambda sample: sample.rank)
    step_s = max(sample.step_s for sample in samples)
    peaks = [sample.peak_bytes for sample in sorted(samples, key=lambda sample: sample.rank)]
    return json.dumps(
        {
            "plan_index": first.plan_index,
            "step": first.step,
            "loss": _finite(first.loss),
            "gradient_norm": _finite(first.gradient_norm),
            "learning_rate": first.learning_rate,
            "step_s": step_s,
            "samples_per_s": first.num_samples / step_s if step_s > 0 else None,
            "peak_bytes": None if all(peak is None for peak in peaks) else peaks,
        }
    )


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the last line of a killed run may be cut
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def measured_step_s(samples: Sequence[Sample], *, device_kind: str) -> float | None:
    """The median over steps of the slowest rank's seconds, None without samples.

    The first step of an attempt warms up, and on CPU a measured step is slower by the profiler: both count only where
    there are no others.
    """
    by_step: dict[int, list[Sample]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append(sample)
    if not by_step:
        return None
    slowest = {step: max(sample.step_s for sample in group) for step, group in by_step.items()}
    first = min(by_step)
    profiled = {step for step, group in by_step.items() if any(sample.peak_bytes is not None for sample in group)}
    left_out = {first} | (profiled if device_kind == "cpu" else set())
    counted = [value for step, value in slowest.items() if step not in left_out] or list(slowest.values())
    return statistics.median(counted)


def peak_by_rank(samples: Sequence[Sample], num_ranks: int) -> tuple[int | None, ...]:
    """The highest measured peak of every rank, None for a rank without one."""
    peaks: list[int | None] = [None] * num_ranks
    for sample in samples:
        if sample.peak_bytes is not None:
            peaks[sample.rank] = max(peaks[sample.rank] or 0, sample.peak_bytes)
    return tuple(peaks)


def summarize(
    plan: Plan,
    plan_index: int,
    samples: Sequence[Sample],
    verdict: dict[str, Any],
    *,
    seed: int,
    device_kind: str,
    num_plans: int,
    num_restarts: int,
    num_failed_saves: int = 0,
    stage_s: dict[str, float],
) -> Summary:
    """The summary of a run that ended under `plan` with rank 0's `verdict`; samples of earlier plans are left out."""
    samples = [sample for sample in samples if sample.plan_index == plan_index]
    step_s = measured_step_s(samples, device_kind=device_kind)
    return Summary(
        workload=plan.workload,
        workload_hash=plan.workload_hash,
        num_ranks=plan.num_ranks,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        seed=seed,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        measured_peak_bytes=peak_by_rank(samples, plan.num_ranks),
        predicted_step_s=plan.prediction.step_s,
        measured_step_s=step_s,
        samples_per_s=plan.global_batch / step_s if step_s else None,
        first_loss=verdict["first_loss"],
        final_loss=verdict["final_loss"],
        eval_loss=verdict["eval_loss"],
        num_steps=verdict["step"],
        num_plans=num_plans,
        num_restarts=num_restarts,
        num_failed_saves=num_failed_saves,
        stage_s=dict(stage_s),
    )
