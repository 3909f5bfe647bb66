"""The measured cells of a sweep: one Ray Tune trial per budget, each a whole run of the pipeline under its plan.

A trial calls `pipeline.run`, which starts a TorchTrainer of its own inside the trial; with Ray 2.60 that works as it
is, if three things are seen to:
- The trial must hold something, since Tune refuses one without resources, and no CPU, because on a cluster of which
  every CPU is a worker the half CPU that is usual would leave the trainer waiting for ever. It holds a thousandth of
  the driver node's own `node:ADDRESS` resource, which also puts it beside the driver's files.
- One trial at a time: two that each hold a part of the workers they need would wait for each other.
- The plan and the profile are there before the run starts, so that `run` resumes with them as they are and neither
  profiles nor plans again; re-planning is off.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
from ray import tune

from osdp_ray.errors import OsdpError
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Profile
from osdp_ray.units import format_bytes_up
from osdp_ray.workload import Workload

_NODE_SHARE = 0.001
_SETTINGS = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the sweep's own handlers hear SIGINT, and SIGTERM as well
    "RAY_AIR_NEW_OUTPUT": "0",  # the newer output prints tables even at verbose=0; the older one keeps silent
}

OnResult = Callable[[int, dict[str, Any] | None, str | None], None]
OnEvent = Callable[[str, dict[str, Any]], None]


def measure(
    workload: Workload,
    profile: Profile,
    plans: Mapping[int, Plan],
    *,
    num_steps: int,
    out: Path | None,
    on_event: OnEvent,
    on_result: OnResult,
) -> None:
    """Trains `num_steps` under the plan of every budget (bytes -> plan), one after another, on the connected cluster.

    `on_result(budget_bytes, metrics, problem)` gets `{"samples_per_s", "step_s", "peak_bytes"}` (peak: of the rank that
    holds most, None where none was measured) or, where a trial failed, why; nothing is raised for a failed trial. Run
    directories and Tune's experiment go to `out`, or to a temporary folder.
    """
    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="osdp-sweep-")))
        stack.enter_context(_environment(_SETTINGS))
        stack.enter_context(_quiet("ray.tune"))
        runs = {b: str(out / "runs" / f"{index}-{format_bytes_up(b)}") for index, b in enumerate(sorted(plans))}
        job = {
            "workload": ray.cloudpickle.dumps(workload),
            "sys_path": list(sys.path),
            "directory": os.getcwd(),
            "profile": profile,
            "plans": dict(plans),
            "runs": runs,
            "num_steps": num_steps,
        }
        listener = _Listener(on_event, on_result)
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_train_cell, job=job), _trial_resources()),
            param_space={"budget_bytes": tune.grid_search(sorted(plans))},
            tune_config=tune.TuneConfig(metric="samples_per_s", mode="max", max_concurrent_trials=1),
            run_config=tune.RunConfig(name="tune", storage_path=str(out), verbose=0, callbacks=[listener]),
        )
        try:
            grid = tuner.fit()
        finally:
            for trial in listener.failed:  # their errors reach Tune's files after the callbacks
                on_result(trial.config["budget_bytes"], None, _problem(trial.get_pickled_error() or trial.get_error()))
        on_event("grid", {"result_grid": grid})


def _train_cell(config: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """One trial, in a process of Tune's: a run under the plan of `config["budget_bytes"]`; returns its metrics."""
    from osdp_ray.pipeline import run

    sys.path.extend(path for path in job["sys_path"] if path not in sys.path)
    with contextlib.suppress(OSError):  # Tune moved into the trial's folder
        os.chdir(job["directory"])
    workload = ray.cloudpickle.loads(job["workload"])
    plan, run_dir = job["plans"][config["budget_bytes"]], Path(job["runs"][config["budget_bytes"]])
    # A class of the driver's __main__ has no source here, and so another hash than it had there.
    identity = {"workload_hash": workload.hash()}
    dataclasses.replace(job["profile"], **identity).save(run_dir / "profile.json")
    dataclasses.replace(plan, **identity).save(run_dir / "plan-0.json")
    summary = run(
        workload,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        budget_bytes=plan.budget_bytes,
        num_workers=plan.num_ranks,
        num_steps=job["num_steps"],
        out=run_dir,
        resume=True,
        max_replans=0,
    )
    shutil.rmtree(run_dir / "saves", ignore_errors=True)  # whole models, of which a sweep has no use
    return {
        "samples_per_s": summary.samples_per_s,
        "step_s": summary.measured_step_s,
        "peak_bytes": max((peak for peak in summary.measured_peak_bytes if peak is not None), default=None),
        "final_loss": summary.final_loss,
    }


def _trial_resources() -> tune.PlacementGroupFactory:
    node_id = ray.get_runtime_context().get_node_id()
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    return tune.PlacementGroupFactory([{f"node:{address}": _NODE_SHARE}])


class _Listener(tune.Callback):
    """Passes on what happens to trials. Tune writes its callbacks to disk, where this one listens to nobody."""

    def __init__(self, on_event: OnEvent, on_result: OnResult) -> None:
        self._on_event, self._on_result = on_event, on_result
        self.failed: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Listener, (_ignore, _ignore))

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._on_event("trial", {"budget_bytes": trial.config["budget_bytes"]})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._on_result(trial.config["budget_bytes"], trial.last_result, None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.failed.append(trial)


def _ignore(*_: Any) -> None:
    return None


def _problem(error: BaseException | str | None) -> str:
    """Why a trial failed, in one line: the OsdpError that the run raised, if that is what it was."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, OsdpError):
        return str(cause)
    lines = str(cause or "").strip().splitlines()
    last = lines[-1] if lines else "the trial failed and left no error behind"
    return f"{type(cause).__name__}: {last}" if isinstance(cause, BaseException) else last


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the time of a block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keeps a logger to itself for the time of a block: a failed trial's traceback is in its row and in its folder."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
