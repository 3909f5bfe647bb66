"""The pipeline: workload and cluster -> a trained model, through all stages; the only module that knows all of them.

    connect -> discover -> profile -> plan -> execute, observed -> (recalibrate -> plan -> execute again)* -> summary

An attempt trains in a background thread while this one drains the hub, writes metrics and decides on re-planning.
What happens is told to `on_event(kind, facts)`; nothing is printed here.
"""

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from osdp_ray.attempt import Attempt
from osdp_ray.costs import predict
from osdp_ray.discovery import connect, discover
from osdp_ray.errors import ClusterError, InfeasibleError, Interrupted, OsdpError, SolverError
from osdp_ray.execution import TrainOptions, check_weights, execute
from osdp_ray.execution.places import absolute, place_of
from osdp_ray.observation import HubClient, Note, load_parquet, save_parquet, start_hub
from osdp_ray.planning import plan as make_plan
from osdp_ray.profiling import profile as make_profile
from osdp_ray.records.cluster import Cluster
from osdp_ray.records.plan import Plan, ScatterGroup
from osdp_ray.records.profile import Profile
from osdp_ray.records.summary import Summary
from osdp_ray.records.telemetry import Sample, Telemetry
from osdp_ray.replanning import drifted, recalibrate
from osdp_ray.resuming import Earlier, find_earlier, kept_profile, require_no_saves, reusable_profile
from osdp_ray.run_directory import MetricsFile, RunDirectory, measured_step_s, summarize
from osdp_ray.settings import Settings, check_batches, check_settings
from osdp_ray.signals import StopSignals
from osdp_ray.units import format_bytes
from osdp_ray.workload import Workload

__all__ = ["Settings", "Summary", "run"]

DEFAULT_BUDGET_FRACTION = 0.9
LEAST_GAIN = 1.03
_POLL_S = 0.3
_ABORT_WAIT_S = 10.0
_log = logging.getLogger(__name__)

OnEvent = Callable[[str, dict[str, Any]], None]


def run(
    workload: Workload,
    *,
    global_batch: int,
    num_steps: int,
    out: str | os.PathLike[str],
    num_workers: int | None = None,
    budget_bytes: int | None = None,
    micro_batch: int | None = None,
    prefetch: int | None = None,
    scatter_group: ScatterGroup = "shared",
    seed: int = 0,
    save_every: int = 0,
    eval_every: int = 0,
    max_norm: float | None = 1.0,
    compiles: bool = False,
    saves_kept: int = 2,
    async_saves: bool = False,
    saves_to: str = "",
    init_from: str = "",
    init_partly: bool = False,
    resume: bool = False,
    address: str | None = None,
    max_replans: int = 2,
    on_event: OnEvent | None = None,
) -> Summary:
    """Trains a workload with the fastest plan that fits `budget_bytes` per device, and returns what came of it.

    Without a budget it is 90 % of the smallest device, or that of the run that goes on. `global_batch` samples make a
    step, whatever the plan; `prefetch` and `scatter_group` are those of all its plans, see `plan`. The run's files go
    to `out`; with `resume` the run there goes on from its newest save, under its newest plan if the cluster is as it
    was, else under a new one. `on_event(kind, facts)` hears of: stage (name, seconds: None as it starts), cluster,
    profile, plan (the record, index), samples, eval, saved, save_failed, replan, done. How saves are written and
    weights are taken in: see `TrainOptions`.

    SIGINT or SIGTERM, in the main thread, save at the next step and raise Interrupted; a second one ends the run at
    once. Raises OsdpError for everything that a user can mend. Nothing is left running.
    """
    options = TrainOptions(
        num_steps=num_steps,
        seed=seed,
        save_every=save_every,
        eval_every=eval_every,
        max_norm=max_norm,
        compiles=compiles,
        saves_kept=saves_kept,
        async_saves=async_saves,
        saves_to=absolute(saves_to) if saves_to else "",
        init_from=check_weights(init_from) if init_from else "",
        init_partly=init_partly,
    )
    settings = Settings(
        num_workers=num_workers,
        budget_bytes=budget_bytes,
        global_batch=global_batch,
        micro_batch=micro_batch,
        prefetch=prefetch,
        scatter_group=scatter_group,
        resume=resume,
        address=address,
        max_replans=max_replans,
        options=options,
    )
    check_settings(settings)
    directory = RunDirectory(out)
    if not resume:
        directory.require_new()
        require_no_saves(saves_to)
    connected_before = ray.is_initialized()
    with StopSignals() as signals:
        training = _Run(workload, settings, directory, signals, on_event or (lambda kind, facts: None))
        try:
            return training.run()
        except KeyboardInterrupt:  # StopNow, which waiting on Ray turns into a plain one
            raise training.interrupted(signals.received or signal.SIGINT) from None
        except ray.exceptions.RayError as error:
            if signals.received is not None:  # a signal to the whole process group ends an embedded Ray as well
                raise training.interrupted(signals.received) from None
            raise ClusterError(
                f"the Ray cluster was lost ({str(error).strip().splitlines()[0]})",
                "See 'ray status' and the logs of the head node; go on by --resume",
            ) from error
        finally:
            signals.ignore()
            training.close()
            directory.drop_bookkeeping()
            if not connected_before:
                ray.shutdown()  # the last of all: Ray 2.60 resets the handler of SIGTERM on its way out


class _Run:
    """One call of `run`: its records, its position, its files."""

    def __init__(
        self, workload: Workload, settings: Settings, directory: RunDirectory, signals: StopSignals, on_event: OnEvent
    ) -> None:
        self.workload, self.settings, self.directory = workload, settings, directory
        self.signals, self.tell = signals, on_event
        self.cluster: Cluster
        self.profile: Profile
        self.plan: Plan
        self.plan_index = 0
        self.hub: HubClient | None = None
        self.metrics: MetricsFile | None = None
        self.samples: list[Sample] = []
        self.newest_save: Path | str | None = None
        self.last_step = self.num_replans = self.num_failed_saves = 0
        self.stage_s: dict[str, float] = {}
        self.candidate: Plan | None = None
        self.used_decisions: list[tuple[object, ...]] = []

    def run(self) -> Summary:
        hash_of_workload = self.workload.hash()  # reads the data's facts: errors of the data come before all else
        earlier = find_earlier(self.directory, hash_of_workload, self.settings) if self.settings.resume else None
        if earlier is not None:
            self.newest_save, self.last_step = earlier.save, earlier.step
        with self._stage("discover"):
            connect(self.settings.address, num_workers=self.settings.num_workers)
            self.cluster = discover(num_workers=self.settings.num_workers)
        check_batches(self.settings.global_batch, self.cluster.num_ranks, self.settings.micro_batch)
        self.tell("cluster", {"cluster": self.cluster})
        if earlier is None or not self._reuse(earlier):
            self._profile_and_plan(earlier)
        self._open_files(() if earlier is None else earlier.samples)
        self.hub = start_hub(f"{self.directory.path.name}-{secrets.token_hex(4)}")
        verdict = self._train()
        summary = summarize(
            self.plan,
            self.plan_index,
            self.samples,
            verdict,
            seed=self.settings.options.seed,
            device_kind=self.cluster.device_kind,
            num_plans=len(self.directory.plan_paths()),
            num_restarts=self.num_replans,
            num_failed_saves=self.num_failed_saves,
            stage_s=self.stage_s,
        )
        self._write_telemetry()
        summary.save(self.directory.path / "summary.json")
        self.tell("done", {"summary": summary})
        return summary

    def interrupted(self, signal_number: int) -> Interrupted:
        return Interrupted(int(signal_number), self.last_step, str(self.newest_save or ""))

    def close(self) -> None:
        """Ends what this run started, whatever happened before."""
        with contextlib.suppress(OSError):  # of a full disk the run itself has told, and its error is not to be lost
            if self.metrics is not None:
                self.metrics.close()
            if self.samples and not (self.directory.path / "telemetry.parquet").exists():
                self._write_telemetry()
        if self.hub is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                self.hub.close()

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.signals.check()
        self.tell("stage", {"name": name, "seconds": None})
        start_s = time.monotonic()
        yield
        self.stage_s[name] = self.stage_s.get(name, 0.0) + time.monotonic() - start_s
        self.tell("stage", {"name": name, "seconds": self.stage_s[name]})

    # Planning

    def _reuse(self, earlier: Earlier) -> bool:
        """Takes the earlier plan where it still fits."""
        profile = reusable_profile(self.directory, earlier.plan, self.cluster, self.settings)
        if profile is None:
            return False
        self.profile, self.plan, self.plan_index = profile, earlier.plan, earlier.index
        self.cluster.save(self.directory.path / "cluster.json")
        self.tell("plan", {"plan": self.plan, "index": self.plan_index})
        return True

    def _profile_and_plan(self, earlier: Earlier | None) -> None:
        """Nothing is written before there is a plan, so that cluster and profile of the directory are the plan's."""
        with self._stage("profile"):
            kept = None if earlier is None else kept_profile(self.directory, earlier.plan, self.cluster)
            self.profile = kept or make_profile(self.workload, self.cluster)
        self.tell("profile", {"profile": self.profile})
        with self._stage("plan"):
            plan = self._plan(self.profile, None if earlier is None else earlier.plan.budget_bytes)
        self.cluster.save(self.directory.path / "cluster.json")
        self.profile.save(self.directory.path / "profile.json")
        self._use_plan(plan, 0 if earlier is None else earlier.index + 1)

    def _plan(self, profile: Profile, earlier_budget_bytes: int | None = None) -> Plan:
        budget_bytes = self.settings.budget_bytes or earlier_budget_bytes
        if budget_bytes is None:
            budget_bytes = int(self.cluster.smallest_memory_bytes * DEFAULT_BUDGET_FRACTION)
        return make_plan(profile, budget_bytes=budget_bytes, **self.settings.of_plans)

    def _use_plan(self, plan: Plan, index: int) -> None:
        self.plan, self.plan_index = plan, index
        plan.save(self.directory.plan_path(index))
        self.tell("plan", {"plan": plan, "index": index})

    # Training

    def _train(self) -> dict[str, Any]:
        """Attempts until the last step; an attempt that ends for a re-plan is followed by one under the new plan."""
        while True:
            with self._stage("train"):
                verdict = self._attempt()
            self.newest_save = place_of(verdict["save"]) if verdict["save"] else self.newest_save
            self.last_step = verdict["step"]
            if verdict["status"] == "done":
                return verdict
            if self.signals.received is not None or self.candidate is None:
                raise Interrupted(self.signals.received or 0, verdict["step"], verdict["save"] or "")
            self._use_plan(self.candidate, self.plan_index + 1)
            self.candidate = None
            self.num_replans += 1

    def _attempt(self) -> dict[str, Any]:
        """Runs `execute` in a thread and returns its verdict; this thread watches, and hears signals."""
        box: dict[str, Any] = {}

        def work() -> None:
            try:
                box["verdict"] = execute(
                    self.workload,
                    self.plan,
                    self.cluster,
                    options=self.settings.options,
                    run_dir=self.directory.path,
                    hub=self.hub,
                    plan_index=self.plan_index,
                    resume_from=self.newest_save,
                )
            except BaseException as error:  # the border of a thread: raised again below
                box["error"] = error

        assert self.hub is not None
        self.used_decisions.append(self.plan.decisions)
        self.hub.set_command("")
        self.signals.deferred = True
        thread = threading.Thread(target=work, name="osdp-fit", daemon=True)
        thread.start()
        try:
            self._watch(thread, self.hub)
        except BaseException:
            self.signals.ignore()
            with contextlib.suppress(ray.exceptions.RayError):
                self.hub.kill_workers()
            thread.join(_ABORT_WAIT_S)
            raise
        finally:
            self.signals.deferred = False
        if "error" in box:
            raise box["error"]
        return box["verdict"]

    def _watch(self, thread: threading.Thread, hub: HubClient) -> None:
        """Until the thread ends: takes in news, passes a stop on, decides on a re-plan."""
        attempt, command = Attempt(), ""
        while thread.is_alive():
            thread.join(_POLL_S)
            samples, notes = hub.drain()
            attempt.add(samples)
            self._take_in(samples, notes)
            if self.signals.received is not None and command != "stop":
                command = "stop"
                hub.set_command(command)
            elif not command and self._wants_replan(attempt):
                command = "replan"
                hub.set_command(command)
        self._take_in(*hub.drain())

    # Files

    def _open_files(self, samples_of_save: tuple[Sample, ...]) -> None:
        path = self.directory.path
        (path / "summary.json").unlink(missing_ok=True)
        telemetry = path / "telemetry.parquet"
        if self.last_step and telemetry.exists():
            with contextlib.suppress(OsdpError):
                self.samples = [s for s in load_parquet(telemetry).samples if s.step <= self.last_step]
        telemetry.unlink(missing_ok=True)
        self.metrics = MetricsFile(
            path / "metrics.jsonl",
            num_ranks=self.cluster.num_ranks,
            keep_up_to_step=self.last_step,
            samples_of_save=samples_of_save,
        )

    def _write_telemetry(self) -> None:
        save_parquet(Telemetry(samples=tuple(self.samples)), self.directory.path / "telemetry.parquet")

    # Re-planning

    def _take_in(self, samples: list[Sample], notes: list[Note]) -> None:
        """What the hub had for us goes to the files and to the front end."""
        assert self.metrics is not None
        if samples:
            self.samples += samples
            self.last_step = max(self.last_step, max(sample.step for sample in samples))
            self.metrics.add(samples)
            self.tell("samples", {"samples": samples})
        for kind, facts in notes:
            if kind == "saved":
                self.newest_save = place_of(facts["path"])
            elif kind == "save_failed":
                self.num_failed_saves += 1
                _log.warning("training goes on, and is not saved at step %d: %s", facts["step"], facts["problem"])
            self.tell(kind, facts)

    def _wants_replan(self, attempt: Attempt) -> bool:
        """Whether another plan is to replace the running one: planned anew with the recalibrated profile."""
        if self.num_replans >= self.settings.max_replans:
            return False
        if not attempt.is_time_to_think(self.cluster.num_ranks, lambda seen: drifted(self.plan, seen) is not None):
            return False
        profile = recalibrate(self.profile, self.plan, attempt.telemetry)
        try:
            candidate = self._plan(profile, self.plan.budget_bytes)
        except (InfeasibleError, SolverError) as error:
            _log.warning("the running plan stays: %s", error)
            return False
        if candidate.decisions in self.used_decisions:
            return False
        running = predict(profile, self.plan)
        ratio = candidate.prediction.samples_per_s / running.samples_per_s
        if running.device_bytes > self.plan.budget_bytes:
            reason = f"the peak is {format_bytes(running.device_bytes)}, above {format_bytes(self.plan.budget_bytes)}"
        elif ratio >= LEAST_GAIN and self._pays_back(ratio, attempt):
            reason = f"another plan is {(ratio - 1) * 100:.1f} % faster"
        else:
            return False
        self.profile, self.candidate = profile, candidate
        self.tell("replan", {"reason": reason, "plan": candidate})
        return True

    def _pays_back(self, ratio: float, attempt: Attempt) -> bool:
        """Whether the steps that are left save more seconds than the restart costs, taken from this attempt's start."""
        step_s = measured_step_s(attempt.samples, device_kind=self.cluster.device_kind) or 0.0
        left_s = (self.settings.options.num_steps - self.last_step) * step_s
        return left_s * (1 - 1 / ratio) > attempt.setup_s
