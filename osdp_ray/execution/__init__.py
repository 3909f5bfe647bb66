"""Stage 4: Plan -> a running training on every worker of the cluster, by Ray Train and FSDP2.

`execute` runs one attempt under one plan; `parallelize` applies a plan to a model in a training loop of one's own.
Neither torch nor ray is imported before one of them is used.
"""

import contextlib
import importlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osdp_ray.errors import PlanMismatchError
from osdp_ray.execution.options import RAY_FOLDER, TrainOptions
from osdp_ray.execution.places import absolute
from osdp_ray.records.cluster import Cluster
from osdp_ray.records.plan import Plan
from osdp_ray.workload import Workload

__all__ = [
    "Save",
    "SaveWriter",
    "TrainOptions",
    "build_on_meta",
    "check_weights",
    "clip_grad_norm",
    "execute",
    "export",
    "latest_save",
    "list_saves",
    "load",
    "load_weights",
    "parallelize",
    "read_save",
    "save",
]

_HOMES = {
    "Save": "osdp_ray.execution.saves",
    "SaveWriter": "osdp_ray.execution.save_writing",
    "parallelize": "osdp_ray.execution.apply",
    "build_on_meta": "osdp_ray.modeling.materialize",
    "clip_grad_norm": "osdp_ray.execution.clipping",
    "check_weights": "osdp_ray.execution.weights",
    "export": "osdp_ray.execution.exports",
    "load_weights": "osdp_ray.execution.weights",
    "latest_save": "osdp_ray.execution.saves",
    "list_saves": "osdp_ray.execution.saves",
    "load": "osdp_ray.execution.saves",
    "read_save": "osdp_ray.execution.saves",
    "save": "osdp_ray.execution.saves",
}

# Ray Train reads these from the driver's environment and hands the first two on to controller and workers.
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # 2 s by default: the time until an ended attempt is noticed
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one more process; a lost worker is noticed anyway
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of data mean the same in driver and workers
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def execute(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    options: TrainOptions,
    run_dir: str | os.PathLike[str],
    hub: Any,
    plan_index: int = 0,
    resume_from: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Trains under a plan until the last step or the driver's command, and returns rank 0's verdict.

    The verdict is `{"status": "done" | "stopped" | "replan", "step", "save", "first_loss", "final_loss",
    "eval_loss"}`. `hub` is an `observation.HubClient`: workers push what they measure to it and hear commands from
    it. Saves go to `run_dir`, which all nodes must share, or to `options.saves_to`. Raises WorkerMemoryError where a
    worker ran out of memory, the OsdpError that a worker raised, and WorkerError for every other failure. Nothing is
    retried: the same plan would run out of memory again, and a lost worker needs another one. Raises PlanMismatchError
    for a plan of another workload or another cluster.
    """
    if plan.workload_hash != workload.hash():
        raise PlanMismatchError(f"workload {plan.workload!r} with hash", plan.workload_hash, workload.hash())
    if plan.ranks_per_node != cluster.ranks_per_node:
        planned, found = (" + ".join(map(str, counts)) for counts in (plan.ranks_per_node, cluster.ranks_per_node))
        raise PlanMismatchError("ranks per node", planned, found)

    import ray.cloudpickle
    import ray.train
    from ray.train.torch import TorchTrainer

    from osdp_ray.execution.failures import translate
    from osdp_ray.execution.worker import train_worker

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Without the one for datasets: ray 2.60 starts processes with Ray Data for it, and there are none."""
            callbacks = super()._create_default_callbacks()
            return [callback for callback in callbacks if type(callback).__name__ != "DatasetsCallback"]

    run_dir = Path(run_dir).resolve()
    storage = run_dir / RAY_FOLDER
    trainer = Trainer(
        train_worker,
        train_loop_config={
            "workload": ray.cloudpickle.dumps(workload),
            "import_paths": _import_paths(workload),
            "directory": os.getcwd(),
            "plan": plan.to_json(),
            "options": vars(options).copy(),
            "run_dir": str(run_dir),
            "hub": hub,
            "plan_index": plan_index,
            "resume_from": None if resume_from is None else absolute(resume_from),
        },
        scaling_config=_scaling(cluster),
        run_config=ray.train.RunConfig(
            name=f"plan-{plan_index}-{secrets.token_hex(4)}",  # a name used before would resume by itself
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=2),
            logging_config=ray.train.LoggingConfig(log_level="CRITICAL"),
        ),
    )
    try:
        with _environment(_SETTINGS):
            return trainer.fit().return_value
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        raise translate(error) from error
    finally:
        shutil.rmtree(storage, ignore_errors=True)  # Ray Train's own bookkeeping: empty, since it keeps no checkpoint


def _scaling(cluster: Cluster) -> Any:
    """One worker per device, each pinned to its device's node, so that ranks lie as the plan counts on."""
    import ray.train

    on_gpus = cluster.device_kind == "cuda"
    return ray.train.ScalingConfig(
        num_workers=cluster.num_ranks,
        use_gpu=on_gpus,
        resources_per_worker={"GPU": 1} if on_gpus else {"CPU": 1},
        label_selector=[{"ray.io/node-id": device.node_id} for device in cluster.devices],
    )


def _import_paths(workload: Workload) -> list[str]:
    """The folder that holds the top package of the workload's module, so that workers import it as the driver did."""
    module = sys.modules.get(type(workload).__module__)
    file = getattr(module, "__file__", None)
    if file is None or type(workload).__module__ == "__main__":
        return []
    return [str(Path(file).resolve().parents[type(workload).__module__.count(".") + (Path(file).stem == "__init__")])]


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Environment variables for the time of a block; what the user set stays."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
