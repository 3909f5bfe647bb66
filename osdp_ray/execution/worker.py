"""What runs on every worker: the training loop of one attempt under one plan.

Order of one optimizer step, which `costs.simulate_bytes` mirrors:

    for each micro-batch of the accumulation:   batch, loss, (loss / accumulation).backward(), drop references
    clip_grad_norm, optimizer.step(), optimizer.zero_grad(set_to_none=True), scheduler.step()
    one all-reduce of [sum of losses, stop, replan]

A loss or a gradient norm that is not finite ends the run with that step, on every rank: both are global.

Gradients synchronise in every micro-batch, or in the last one where the plan says so; FSDP2 averages them over ranks.
The all-reduce makes the loss the mean over the global batch and the driver's command common, so that all ranks end at
the same step.
"""

import contextlib
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from osdp_ray.blame import calling
from osdp_ray.errors import DivergedError, OsdpError, WorkerError, WorkerMemoryError, WorkloadError
from osdp_ray.execution.apply import free_gathered, parallelize
from osdp_ray.execution.clipping import clip_grad_norm
from osdp_ray.execution.finite import is_finite
from osdp_ray.execution.options import TrainOptions
from osdp_ray.execution.random_state import derive_seed, seed_all
from osdp_ray.execution.save_writing import SaveWriter
from osdp_ray.execution.saves import Save, load
from osdp_ray.execution.weights import load_weights
from osdp_ray.modeling import user_code
from osdp_ray.modeling.heap import keep_freed_memory
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.records.plan import Plan
from osdp_ray.records.telemetry import Sample
from osdp_ray.workload import Workload

_MEMORY_REMEDY = "Lower --memory-budget so that the plan leaves more room, or lower --micro-batch"


def train_worker(config: dict[str, Any]) -> dict[str, Any]:
    """The train function of the TorchTrainer; `config` is what `execute` makes. Returns this rank's verdict.

    `{"status": "done" | "stopped" | "replan", "step", "save", "first_loss", "final_loss", "eval_loss"}`. Raises
    WorkerMemoryError where memory ran out, WorkloadError for what the workload's own code raised, and WorkerError for
    everything else; all name the rank and are pickled everywhere. The whole traceback is in
    `<run>/failure-rank-<rank>.txt`.
    """
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    sys.path[:0] = [path for path in config["import_paths"] if path not in sys.path]
    with contextlib.suppress(OSError):  # a node without the driver's folder keeps its own
        os.chdir(config["directory"])
    try:
        return _run(rank, config)
    except WorkloadError as error:
        where = _write_traceback(rank, config["run_dir"])
        problem, remedy = f"{error.problem} on rank {rank}", f"{error.remedy} The traceback is in {where}"
        raise WorkloadError(error.method, problem, error.place, remedy) from None
    except OsdpError:
        raise
    except Exception as error:  # the border of this process: other ranks and the driver need the rank
        where = _write_traceback(rank, config["run_dir"])
        if user_code.is_out_of_memory(error):
            raise WorkerMemoryError(rank, str(error).splitlines()[0], _MEMORY_REMEDY) from None
        raise WorkerError(rank, _describe(error), f"The traceback is in {where}") from None


def _write_traceback(rank: int, run_dir: str) -> Path:
    """Writes that of the exception which is being handled."""
    where = Path(run_dir, f"failure-rank-{rank}.txt")
    with contextlib.suppress(OSError):
        where.write_text(traceback.format_exc(), encoding="utf-8")
    return where


def _run(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    import ray.cloudpickle
    import ray.train.torch

    device = ray.train.torch.get_device()
    if device.type == "cpu":
        keep_freed_memory()
    observer = config["hub"].observer(rank=rank, device_kind=device.type)
    try:
        loop = TrainLoop(
            workload=ray.cloudpickle.loads(config["workload"]),
            plan=Plan.from_json(config["plan"]),
            options=TrainOptions(**config["options"]),
            run_dir=config["run_dir"],
            plan_index=config["plan_index"],
            device=device,
            observer=observer,
        )
        return loop.run(config["resume_from"])
    finally:
        observer.close()


class TrainLoop:
    """One rank's model, optimizer and position. The process group must be up, with as many ranks as the plan has.

    `observer` measures steps, takes samples and notes, and knows the driver's command (see observation.Observer).
    """

    def __init__(
        self,
        *,
        workload: Workload,
        plan: Plan,
        options: TrainOptions,
        run_dir: str,
        plan_index: int,
        device: torch.device,
        observer: Any,
    ) -> None:
        self.workload, self.plan, self.options = workload, plan, options
        self.run_dir, self.plan_index, self.device, self.observer = run_dir, plan_index, device, observer
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.workload_hash = workload.hash()
        model, initialisation = build_on_meta(workload)
        self.model = parallelize(model, plan, device_type=device.type, compiles=options.compiles)
        initialisation.materialize(self.model, device, options.seed)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = user_code.build_optimizer(workload, self.parameters)
        self.scheduler = user_code.build_scheduler(workload, self.optimizer, options.num_steps)
        self.status = torch.zeros(3, device=device)  # sum of losses, stop, replan
        self.step = self.num_samples = 0
        self.first_loss: float | None = None
        self.final_loss: float | None = None
        self.writer = SaveWriter(
            options.saves_to or run_dir, keep=options.saves_kept, in_background=options.async_saves
        )

    def run(self, resume_from: str | None) -> dict[str, Any]:
        """Trains up to the last step, or until the driver's command, and returns the verdict."""
        seed_all(derive_seed(self.options.seed, self.rank))  # dropout differs between ranks
        if resume_from is not None:
            self._resume(resume_from)
        elif self.options.init_from:
            load_weights(self.options.init_from, self.model, strict=not self.options.init_partly)
        eval_loss = None
        self.model.train()
        per_round = self.plan.micro_batch * self.num_ranks
        start = self.num_samples // per_round
        batches = user_code.batches(
            self.workload, self.rank, self.num_ranks, self.plan.micro_batch, self.options.seed, start
        )
        command = self._first_command()
        attempt_step, may_replan = 0, True
        while not command and self.step < self.options.num_steps:
            attempt_step += 1
            command = self._step(batches, attempt_step)
            is_last = self.step == self.options.num_steps
            if is_last or (self.options.eval_every and self.step % self.options.eval_every == 0):
                eval_loss = self._evaluate()
            if self.options.save_every and self.step % self.options.save_every == 0:
                self._save()
            if command == "replan" and not (may_replan and self._is_saved()):
                command, may_replan = "", False  # without a save the next plan has nothing to go on from
        if self.step > 0 and not self._is_saved() and self.writer.error is not None:
            raise self.writer.error
        status = "done" if self.step >= self.options.num_steps else {"stop": "stopped"}.get(command, command)
        return {
            "status": status,
            "step": self.step,
            "save": self.writer.path or None,
            "first_loss": self.first_loss,
            "final_loss": self.final_loss,
            "eval_loss": eval_loss,
        }

    def _resume(self, path: str) -> None:
        facts = load(path, self.model, self.optimizer, self.scheduler, workload_hash=self.workload_hash)
        self.step, self.num_samples = facts.step, facts.num_samples
        self.writer.step, self.writer.path = facts.step, path
        self.first_loss, self.final_loss = facts.first_loss, facts.final_loss

    def _first_command(self) -> str:
        self.status.zero_()
        self._flag(self.observer.attend())
        dist.all_reduce(self.status)
        return self._common_command(self.status.tolist())

    def _flag(self, command: str) -> None:
        if self.rank == 0 and command:
            self.status[1 if command == "stop" else 2] = 1.0

    def _common_command(self, status: list[float]) -> str:
        return "stop" if status[1] else "replan" if status[2] else ""

    def _step(self, batches: Iterator[Any], attempt_step: int) -> str:
        """One optimizer step, its sample recorded. Returns the command that holds on every rank after it."""
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        with self.observer.measure(attempt_step, self._live_bytes) as memory:
            start_s = time.perf_counter()
            clock = _Clock(
                self.device if self.device.type == "cuda" and self.observer.is_sampled(attempt_step) else None
            )
            self.status.zero_()
            for number in range(1, self.plan.accumulation + 1):
                if self.plan.synchronise == "last":
                    self.model.set_requires_gradient_sync(number == self.plan.accumulation)
                self._micro_batch(batches, clock)
            norm = self._update()
            clock.lap("optimizer_s")
            self._flag(self.observer.command() if self.rank == 0 else "")
            dist.all_reduce(self.status)
            status = self.status.tolist()
            step_s = time.perf_counter() - start_s
        self.step += 1
        self.num_samples += self.plan.global_batch
        loss = status[0] / (self.plan.accumulation * self.num_ranks)
        self.final_loss = loss
        self.first_loss = loss if self.first_loss is None else self.first_loss
        norm_value = math.nan if norm is None else float(norm)
        self.observer.record(
            Sample(
                plan_index=self.plan_index,
                rank=self.rank,
                step=self.step,
                loss=loss,
                gradient_norm=norm_value,
                learning_rate=learning_rate,
                num_samples=self.plan.global_batch,
                step_s=step_s,
                data_s=clock.seconds["data_s"],
                forward_s=clock.seconds["forward_s"],
                backward_s=clock.seconds["backward_s"],
                optimizer_s=clock.seconds["optimizer_s"],
                peak_bytes=memory.peak_bytes,
                persistent_bytes=self._persistent_bytes(attempt_step),
                reserved_bytes=memory.reserved_bytes,
                resident_bytes=self.observer.resident_bytes(),
                num_retries=memory.num_retries,
            )
        )
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        if norm is not None and not math.isfinite(norm_value):
            raise self._diverged(f"the norm of the gradients is {norm_value}")
        return self._common_command(status)

    def _diverged(self, problem: str) -> DivergedError:
        self._settle_saves()
        return DivergedError(self.step, problem, self.writer.path)

    def _micro_batch(self, batches: Iterator[Any], clock: "_Clock") -> None:
        batch = to_device(next(batches), self.device)
        clock.lap("data_s")
        loss = user_code.loss(self.workload, self.model, batch)
        clock.lap("forward_s")
        user_code.backward(loss / self.plan.accumulation)
        self.status[0].add_(loss.detach())
        clock.lap("backward_s")

    def _update(self) -> torch.Tensor | None:
        max_norm = self.options.max_norm
        norm = None if max_norm is None else clip_grad_norm(self.parameters, max_norm)
        user_code.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            with calling("build_scheduler", doing="gave a scheduler whose step() raised"):
                self.scheduler.step()
        return norm

    def _live_bytes(self) -> int:
        return self.observer.persistent_bytes(self.model, self.optimizer, (self.status,))

    def _persistent_bytes(self, attempt_step: int) -> int:
        """What stays between steps; counted once, since it is the same after every step."""
        if attempt_step == 1:
            self._persistent = self._live_bytes()
        return self._persistent

    def _evaluate(self) -> float | None:
        """The mean loss over the held-out batches of all ranks; random state and training mode stay as they were."""
        batches = user_code.eval_batches(self.workload, self.rank, self.num_ranks, self.plan.micro_batch)
        if batches is None:
            return None
        total = torch.zeros(2, device=self.device)  # sum of losses, batches
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            for batch in batches:
                on_device = to_device(batch, self.device)
                total[0].add_(user_code.loss(self.workload, self.model, on_device, needs_gradient=False))
                total[1].add_(1)
                free_gathered(self.model)  # else the next batch held more than a forward in training does
        self.model.train()
        dist.all_reduce(total)
        loss_sum, num_batches = total.tolist()
        if num_batches == 0:
            return None
        if self.rank == 0:
            self.observer.note("eval", step=self.step, loss=loss_sum / num_batches)
        return loss_sum / num_batches

    def _is_saved(self) -> bool:
        """Whether this step's save is committed, once it was tried to its end."""
        self._settle_saves()
        if self.writer.step != self.step:
            self._save()
            self._settle_saves()
        return self.writer.step == self.step

    def _settle_saves(self) -> None:
        self.writer.wait()
        self._tell_of_saves()

    def _save(self) -> None:
        """Saves, or starts to in the background. A save that fails is told to the driver, and training goes on."""
        self.observer.flush()
        # Waits for all ranks, so that the hub has the samples of all of them.
        if not is_finite(self.parameters, self.optimizer, self.device):
            raise self._diverged("the parameters or the optimizer's state are not finite any more after the update")
        facts = Save(
            workload=self.workload.name,
            workload_hash=self.workload_hash,
            step=self.step,
            num_samples=self.num_samples,
            seed=self.options.seed,
            num_steps=self.options.num_steps,
            num_ranks=self.num_ranks,
            global_batch=self.plan.global_batch,
            plan_index=self.plan_index,
            first_loss=self.first_loss,
            final_loss=self.final_loss,
            samples=self.observer.undrained() if self.rank == 0 else (),
            config=self.workload.export_config(),
        )
        self.writer.start(facts, self.model, self.optimizer, self.scheduler)
        self._tell_of_saves()

    def _tell_of_saves(self) -> None:
        for outcome in self.writer.outcomes():
            if self.rank == 0:
                kind, facts = outcome.note
                self.observer.note(kind, **facts)


class _Clock:
    """Seconds per phase of a step. With a CUDA device it waits for it at every lap, so only for sampled steps."""

    def __init__(self, wait_for: torch.device | None) -> None:
        self.seconds = dict.fromkeys(("data_s", "forward_s", "backward_s", "optimizer_s"), 0.0)
        self._wait_for, self._last_s = wait_for, time.perf_counter()

    def lap(self, phase: str) -> None:
        if self._wait_for is not None:
            torch.cuda.synchronize(self._wait_for)
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - self._last_s
        self._last_s = now_s


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`, through tuples, lists and mappings; itself where they are there."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        items = [to_device(item, device) for item in batch]
        if isinstance(batch, list):
            return items
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    return batch


def _describe(error: Exception) -> str:
    """The error in one line, with the innermost line of code outside of torch that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{Path('site-packages', 'torch')}" not in frame.filename] or list(frames)
    place = f" ({Path(own[-1].filename).name} line {own[-1].lineno}, in {own[-1].name})" if own else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'without a text'}{place}"
