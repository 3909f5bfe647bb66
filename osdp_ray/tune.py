"""A sweep over memory budgets: what every budget buys, planned in-process and, where asked, measured through Ray Tune.

    profile (once) -> a plan per budget -> [one Tune trial per budget that fits, one after another] -> SweepResult

Planning needs no cluster and takes less time than a Tune trial takes to start, so only measuring goes through Tune.
Neither ray nor torch is loaded where a Profile is swept.
"""

import collections
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from osdp_ray.errors import InfeasibleError, SweepInterrupted, UsageError
from osdp_ray.planning import plan as make_plan
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.records.sweep import SweepResult, SweepRow
from osdp_ray.settings import check_batches
from osdp_ray.signals import StopSignals
from osdp_ray.workload import Workload

__all__ = ["SweepResult", "SweepRow", "sweep"]

RESULT_FILE, PARQUET_FILE = "sweep.json", "sweep.parquet"

OnEvent = Callable[[str, dict[str, Any]], None]


def sweep(
    profile_or_workload: Profile | Workload,
    budgets_bytes: Sequence[int],
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    measure_steps: int = 0,
    num_workers: int | None = None,
    address: str | None = None,
    out: str | os.PathLike[str] | None = None,
    on_event: OnEvent | None = None,
) -> SweepResult:
    """Plans for every budget (bytes per device), and says what each one buys, in ascending order without duplicates.

    A budget that nothing fits is a row that says so. A Workload is profiled first, on `num_workers` devices of the
    cluster at `address`; a Profile is taken as it is. With `measure_steps` a Workload is trained for that many steps
    under every plan, one after another (see `tune_cells.measure`); a trial that fails is a row with its problem.
    `global_batch` and `micro_batch` are as in `plan`.

    `out` gets sweep.json and sweep.parquet, of a Workload also cluster.json and profile.json, and of a measured sweep
    the run directory of every budget (`runs/`) and Tune's experiment (`tune/`). `on_event(kind, facts)` hears of: stage
    (name, seconds: None as it starts), cluster, profile, row (row: planned, and again once it is measured), trial
    (budget_bytes: it starts), grid (result_grid: Tune's ResultGrid), done (result).

    SIGINT and SIGTERM, in the main thread, end the sweep with SweepInterrupted; what is there by then is written.
    Raises UsageError for arguments that cannot work, SolverError, and what discovery and profiling raise.
    """
    budgets = _check(profile_or_workload, budgets_bytes, global_batch, micro_batch, measure_steps, num_workers)
    job = _Sweep(budgets, global_batch, micro_batch, measure_steps, _open(out), on_event or (lambda kind, facts: None))
    with StopSignals() as signals:
        try:
            if isinstance(profile_or_workload, Profile):
                return job.from_profile(profile_or_workload)
            return job.from_workload(profile_or_workload, num_workers, address)
        except KeyboardInterrupt:  # StopNow, which waiting on Ray turns into a plain one
            number = signals.received or signal.SIGINT
            num_measured = sum(row.is_measured for row in job.rows.values())
            raise SweepInterrupted(int(number), len(job.rows), num_measured, job.save_partial()) from None


class _Sweep:
    """One call of `sweep`: its rows as they come in, its plans, its files."""

    def __init__(
        self,
        budgets_bytes: list[int],
        global_batch: int | None,
        micro_batch: int | None,
        measure_steps: int,
        out: Path | None,
        on_event: OnEvent,
    ) -> None:
        self.budgets_bytes, self.global_batch, self.micro_batch = budgets_bytes, global_batch, micro_batch
        self.measure_steps, self.out, self.tell = measure_steps, out, on_event
        self.rows: dict[int, SweepRow] = {}
        self.plans: dict[int, Plan] = {}
        self.profile: Profile

    def from_profile(self, profile: Profile) -> SweepResult:
        self.profile = profile
        self._plan_all()
        return self._finish()

    def from_workload(self, workload: Workload, num_workers: int | None, address: str | None) -> SweepResult:
        import ray

        from osdp_ray.discovery import connect, discover
        from osdp_ray.profiling import profile as make_profile

        workload.hash()  # reads the data's facts: errors of the data come before all else
        connected_before = ray.is_initialized()
        try:
            with self._stage("discover"):
                connect(address, num_workers=num_workers)
                cluster = discover(num_workers=num_workers)
            self.tell("cluster", {"cluster": cluster})
            if self.global_batch is not None:
                check_batches(self.global_batch, cluster.num_ranks, self.micro_batch)
            with self._stage("profile"):
                self.profile = make_profile(workload, cluster)
            self.tell("profile", {"profile": self.profile})
            if self.out is not None:
                cluster.save(self.out / "cluster.json")
                self.profile.save(self.out / "profile.json")
            self._plan_all()
            if self.measure_steps and self.plans:
                from osdp_ray.tune_cells import measure

                with self._stage("measure"):
                    measure(
                        workload,
                        self.profile,
                        self.plans,
                        num_steps=self.measure_steps,
                        out=self.out,
                        on_event=self.tell,
                        on_result=self._take_measurement,
                    )
            return self._finish()
        finally:
            if not connected_before:
                ray.shutdown()

    def _plan_all(self) -> None:
        with self._stage("plan"):
            previous: Plan | None = None
            for budget_bytes in self.budgets_bytes:
                try:
                    plan = make_plan(
                        self.profile,
                        budget_bytes=budget_bytes,
                        global_batch=self.global_batch,
                        micro_batch=self.micro_batch,
                    )
                except InfeasibleError as error:
                    row = SweepRow(budget_bytes=budget_bytes, fits=False, smallest_budget_bytes=error.leanest_bytes)
                else:
                    plan = previous = plan if previous is None else _faster(plan, previous)
                    self.plans[budget_bytes] = plan
                    row = _row(plan)
                self.rows[budget_bytes] = row
                self.tell("row", {"row": row})
        self._lower_smallest()

    def _lower_smallest(self) -> None:
        """A plan that fits a larger budget may hold less than the leanest one that the error of a smaller one named."""
        peaks = [plan.prediction.peak_bytes for plan in self.plans.values()]
        for budget_bytes, row in self.rows.items():
            if row.smallest_budget_bytes is not None:
                smallest_bytes = min(row.smallest_budget_bytes, *peaks) if peaks else row.smallest_budget_bytes
                self.rows[budget_bytes] = dataclasses.replace(row, smallest_budget_bytes=smallest_bytes)

    def _take_measurement(self, budget_bytes: int, metrics: dict[str, Any] | None, problem: str | None) -> None:
        """Adds what a trial measured to its row, or why it failed."""
        metrics = metrics or {}
        row = dataclasses.replace(
            self.rows[budget_bytes],
            measured_peak_bytes=metrics.get("peak_bytes"),
            measured_step_s=metrics.get("step_s"),
            measured_samples_per_s=metrics.get("samples_per_s"),
            measured_problem=problem,
        )
        if row != self.rows[budget_bytes]:
            self.rows[budget_bytes] = row
            self.tell("row", {"row": row})

    def _result(self) -> SweepResult:
        return SweepResult(
            workload=self.profile.workload,
            workload_hash=self.profile.workload_hash,
            ranks_per_node=self.profile.ranks_per_node,
            measure_steps=self.measure_steps,
            rows=tuple(self.rows[budget_bytes] for budget_bytes in sorted(self.rows)),
        )

    def _finish(self) -> SweepResult:
        result = self._result()
        self.save_partial()
        self.tell("done", {"result": result})
        return result

    def save_partial(self) -> str:
        """Writes the rows there are, and returns where: '' where there is no folder or no row."""
        if self.out is None or not self.rows:
            return ""
        result = self._result()
        result.save_parquet(self.out / PARQUET_FILE)
        result.save(self.out / RESULT_FILE)
        return str(self.out / RESULT_FILE)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.tell("stage", {"name": name, "seconds": None})
        start_s = time.monotonic()
        yield
        self.tell("stage", {"name": name, "seconds": time.monotonic() - start_s})


def _check(
    profile_or_workload: Profile | Workload,
    budgets_bytes: Sequence[int],
    global_batch: int | None,
    micro_batch: int | None,
    measure_steps: int,
    num_workers: int | None,
) -> list[int]:
    """The budgets, ascending and once each. Raises UsageError for the first argument that cannot work."""
    if not budgets_bytes:
        raise UsageError("a sweep of no budgets has nothing to do. Give --budgets at least one size, such as 16MiB.")
    for flag, value, least in (
        ("--budgets", min(budgets_bytes), 1),
        ("--global-batch", global_batch, 1),
        ("--micro-batch", micro_batch, 1),
        ("--num-workers", num_workers, 1),
        ("--measure-steps", measure_steps, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{flag} is {value}, and at least {least} is needed.")
    num_ranks = num_workers
    if isinstance(profile_or_workload, Profile):
        num_ranks = profile_or_workload.num_ranks
        if measure_steps:
            raise UsageError(
                "--measure-steps trains the model, and a profile holds only its costs. "
                "Leave --profile out, so that the workload is there to be trained, or leave --measure-steps out."
            )
        if num_workers not in (None, num_ranks):
            raise UsageError(
                f"the profile was measured on {num_ranks} workers, and --num-workers is {num_workers}. "
                f"Leave --num-workers out, or profile anew on {num_workers}."
            )
    if global_batch is not None and num_ranks is not None:
        check_batches(global_batch, num_ranks, micro_batch)
    return sorted(set(budgets_bytes))


def _open(out: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the sweep, made if it is not there. Raises UsageError where it cannot hold one."""
    if out is None:
        return None
    from osdp_ray.run_directory import RunDirectory

    directory = RunDirectory(out)
    directory.require_new()
    path = directory.path
    if (path / RESULT_FILE).exists() or (path / "runs").exists():
        raise UsageError(f"{path} holds another sweep. Give another --out.")
    return path


def _faster(plan: Plan, previous: Plan) -> Plan:
    """The plan of a budget, or that of the smaller budget before it, which fits too, where the solver found no better.

    The claim to be optimal goes by the bound that the larger budget's solver proved.
    """
    here, before = plan.prediction.samples_per_s, previous.prediction.samples_per_s
    if here >= before:
        return plan
    gap_fraction = max(0.0, here * (1 + plan.solver.gap_fraction) / before - 1)
    return dataclasses.replace(
        previous,
        budget_bytes=plan.budget_bytes,
        alternatives=plan.alternatives,
        solver=dataclasses.replace(plan.solver, status="feasible", gap_fraction=gap_fraction),
    )


def _row(plan: Plan) -> SweepRow:
    uniform = [(other.samples_per_s, other.name) for other in plan.alternatives if other.samples_per_s is not None]
    best_per_s, best_name = max(uniform, default=(None, None))
    return SweepRow(
        budget_bytes=plan.budget_bytes,
        fits=True,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        predicted_step_s=plan.prediction.step_s,
        predicted_samples_per_s=plan.prediction.samples_per_s,
        plan_label=plan_label(plan),
        best_uniform=best_name,
        best_uniform_samples_per_s=best_per_s,
    )


def plan_label(plan: Plan) -> str:
    """What a plan does in a few words: 'all ZeRO-3', or 'stem DP; 3 blocks ZeRO-3, recompute full; 1 block DP; ...'.

    Blocks come in the order of execution, those that do the same counted together.
    """
    labels = {section.label for section in plan.sections}
    if len(labels) == 1:
        return f"all {labels.pop()}"
    counts = collections.Counter(section.label for section in plan.sections if section.is_block)
    blocks = [f"{count} block{'s' if count > 1 else ''} {label}" for label, count in counts.items()]
    ends = [f"{section.name} {section.label}" for section in plan.sections if not section.is_block]
    return "; ".join(ends[:1] + blocks + ends[1:])
