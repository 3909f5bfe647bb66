"""Saves: model, optimizer, scheduler, random state and position, written so that any plan and any world reads them.

    <run>/saves/step-00000120/save.json       Save: what it is, scheduler and optimizer settings     (plain JSON)
                              .metadata       torch.distributed.checkpoint's index of tensors and chunks
                              __0_0.distcp    tensor data, one file per rank

Tensors are named `model.<name>`, `optimizer.<key>.<parameter name>` and `random.<generator>.<rank>` with the model's
own names and whole shapes; every rank writes pieces that it holds (save_tensors). What is written counts for nothing
before it is committed (save_files), so that a kill at any moment leaves the saves before it whole.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from osdp_ray.errors import RecordError, SaveError
from osdp_ray.execution.random_state import derive_seed, random_state, set_random_state
from osdp_ray.execution.save_files import (
    RECORD,
    Place,
    commit,
    drop_old,
    latest_save,
    list_saves,
    make_unfinished,
    remove_unfinished,
    save_places,
    saves_of,
    writer_to,
)
from osdp_ray.execution.save_index import OTHER_SAVE, PieceWriter, RegionLoader, SafeReader, check_files, read_index
from osdp_ray.execution.save_tensors import (
    Offsets,
    Wholes,
    allocate_state,
    collect,
    extra_state,
    own,
    pieces_to_write,
    set_extra_state,
    share_scalars,
)
from osdp_ray.execution.save_values import group_settings, like, plain, set_group_settings
from osdp_ray.records.telemetry import Sample
from osdp_ray.schema import Record, record

__all__ = ["Save", "Snapshot", "derive_seed", "latest_save", "list_saves", "load", "read_save", "save", "snapshot"]

_log = logging.getLogger(__name__)


@record("save", version=2)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Save(Record):
    """What a save holds beside tensors. `step` steps are done, `num_samples` samples of the data are used up.

    `samples` are those that the driver may not have written yet: where it is killed, they are in no other file.
    `optimizer_groups` are the settings of the optimizer's parameter groups, `optimizer_values` the plain numbers in
    its state by parameter name, `model_values` what modules hold as extra state, `config` what an export writes beside
    the tensors. A loop of one's own gives `step`, and of the rest what it has a use for.
    """

    step: int
    workload: str = ""
    workload_hash: str = ""
    num_samples: int = 0
    seed: int = 0
    num_steps: int = 0
    num_ranks: int = 0
    global_batch: int = 0
    plan_index: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    samples: tuple[Sample, ...] = ()
    scheduler: dict[str, Any] | None = None
    optimizer_groups: tuple[dict[str, Any], ...] = ()
    optimizer_values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    model_values: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] | None = None


def read_save(path: str | os.PathLike[str]) -> Save:
    """The record of a save. Raises SaveError where there is none, it is damaged, or a newer release made it."""
    place = Place(path)
    try:
        values = json.loads(place.read(RECORD))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SaveError(str(path), f"there is no {RECORD} in it, so it is no whole save", OTHER_SAVE) from error
    except OSError as error:
        raise SaveError(str(path), f"its {RECORD} cannot be read ({error})", OTHER_SAVE) from error
    except ValueError as error:
        raise SaveError(str(path), f"its {RECORD} is damaged ({error})", OTHER_SAVE) from error
    version = values.get("schema_version") if isinstance(values, dict) else None
    known = Save._schema_version
    if isinstance(version, int) and version > known:
        raise SaveError(
            str(path),
            f"a newer release made it: its schema_version is {version}, and this release reads up to {known}",
            "Install that release of osdp_ray on every node, or give another --out",
        )
    if version == 1:  # it lacks what has a default now
        values["schema_version"] = known
    try:
        return Save.from_json(values, source=f"{path}/{RECORD}")
    except RecordError as error:
        raise SaveError(str(path), str(error), OTHER_SAVE) from error


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What one rank writes: the record, and pieces of tensors, which are views of the model's own until copied."""

    facts: Save
    pieces: dict[str, list[tuple[Offsets, torch.Tensor]]]
    shapes: dict[str, tuple[int, ...]]


def snapshot(facts: Save, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Snapshot:
    """What this rank writes of the state as it is now. Raises SaveError for state that a save cannot hold."""
    wholes, values = collect(model, optimizer)
    wholes |= {name: own(state) for name, state in random_state(_rank()).items()}
    facts = dataclasses.replace(
        facts,
        scheduler=None if scheduler is None else plain("the scheduler", scheduler.state_dict()),
        optimizer_groups=group_settings(optimizer),
        optimizer_values=values,
        model_values=extra_state(model),
    )
    return Snapshot(facts, pieces_to_write(wholes), {name: whole.shape for name, whole in wholes.items()})


def save(
    run_dir: str | os.PathLike[str],
    facts: Save,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    keep: int = 2,
) -> Any:
    """Writes one save of all ranks, which must all call it, and keeps the newest `keep` of the run.

    `run_dir` is a folder that all nodes share, or a URL. `facts` comes without scheduler and optimizer settings, which
    are added here. A whole save of the same step that is there already is left as it is. Returns where it is. Raises
    SaveError, on every rank, where it cannot be written; the saves before it stay.
    """
    return write(run_dir, snapshot(facts, model, optimizer, scheduler), keep=keep)


def write(
    run_dir: str | os.PathLike[str], taken: Snapshot, *, keep: int, group: dist.ProcessGroup | None = None
) -> Any:
    """Writes a snapshot: see `save`. All ranks of `group` call it, in a thread of their own if they like."""
    saves = saves_of(run_dir)
    target, unfinished = save_places(saves, taken.facts.step)

    def prepare() -> bool:
        if _is_whole(target, taken.facts):
            return True
        make_unfinished(saves, unfinished)
        return False

    def finish() -> None:
        check_files(unfinished, read_index(unfinished))
        unfinished.write(RECORD, (json.dumps(taken.facts.to_json(), indent=1) + "\n").encode())
        commit(unfinished, target)

    try:
        if not _on_first_rank(prepare, target, group):
            planner = PieceWriter(taken.pieces, taken.shapes)
            with _quiet():
                dcp.save({}, storage_writer=writer_to(unfinished), planner=planner, process_group=group)
            _on_first_rank(finish, target, group)
    except (dcp.CheckpointException, SaveError) as error:
        if _rank() == 0:  # what was written of it would stand in the way of the next one on a full disk
            _try_to(lambda: remove_unfinished(saves), f"the unfinished {unfinished} cannot be deleted")
        raise error if isinstance(error, SaveError) else _unwritable(target, error) from error
    if _rank() == 0:
        _try_to(lambda: drop_old(saves, keep), f"the saves before {target} cannot be deleted")
    return target.public


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    workload_hash: str | None = None,
    strict: bool = True,
) -> Save:
    """Fills model, optimizer, scheduler and this rank's random state from a save, whatever plan and world run now.

    Without an optimizer it is the model alone. A rank that was not there when the save was written gets a random state
    of its own from (seed, step, rank). Raises SaveError for a damaged save, one of another workload than
    `workload_hash`, and one whose tensors differ, naming them; not `strict`, tensors that only one side has are left as
    they are and named in the log.
    """
    place, rank = Place(path), _rank()
    facts = read_save(path)
    if workload_hash is not None and facts.workload_hash != workload_hash:
        raise SaveError(
            str(path),
            f"it is of workload {facts.workload!r} with hash {facts.workload_hash}, and this one's is {workload_hash}",
            "Resume with the model, data and optimizer settings it was made with, or start anew with another --out",
        )
    index = read_index(place)
    check_files(place, index)
    saved = index.state_dict_metadata
    if optimizer is not None:
        allocate_state(optimizer, model, saved)
    needed, _ = collect(model, optimizer)
    kinds = ("model.",) if optimizer is None else ("model.", "optimizer.")
    shapes = {name: tuple(stored.size) for name, stored in saved.items() if name.startswith(kinds)}
    wholes = agreeing(str(path), needed, shapes, strict)
    states = random_state(rank) if optimizer is not None else {}
    own_random = {name: torch.empty(saved[name].size, dtype=t.dtype) for name, t in states.items() if name in saved}
    fill(place, index, wholes | {name: own(state) for name, state in own_random.items()})
    set_extra_state(model, wholes, facts.model_values)
    if optimizer is None:
        return facts
    share_scalars(optimizer, model, facts.optimizer_values)
    set_group_settings(optimizer, facts.optimizer_groups, path)
    if scheduler is not None:
        if facts.scheduler is None:
            raise SaveError(str(path), "it has no state of a scheduler", "Resume without one, as it was made")
        scheduler.load_state_dict(like(scheduler.state_dict(), facts.scheduler))
    set_random_state(own_random, derive_seed(facts.seed, facts.step, rank))
    return facts


def fill(place: Place, index: Any, wholes: Wholes) -> None:
    """Reads the regions of tensors that this rank has; all ranks call it. Raises SaveError where it cannot."""
    try:
        with _quiet():
            dcp.load(dict.fromkeys(wholes), storage_reader=SafeReader(place, index), planner=RegionLoader(wholes))
    except (dcp.CheckpointException, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise SaveError(str(place), f"its tensors cannot be read ({reason(error)})", OTHER_SAVE) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's word that one process is alone; not in a thread beside others, whose warnings it would take."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def reason(error: BaseException) -> str:
    """One line of an error, of the first rank's where torch collected several."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _unwritable(target: Place, error: BaseException) -> SaveError:
    return SaveError(str(target), f"it cannot be written ({reason(error)})", "Free space there, or give another --out")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _on_first_rank(work: Callable[[], Any], target: Place, group: dist.ProcessGroup | None) -> Any:
    """What `work` gives on rank 0, on every rank; or raises SaveError on every rank."""
    box: list[Any] = [None, None]  # result, problem
    if _rank() == 0:
        try:
            box[0] = work()
        except SaveError as error:
            box[1] = error
        except Exception as error:  # a border between ranks: the others wait, so whatever it was must reach them
            box[1] = _unwritable(target, error)
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _try_to(work: Callable[[], None], problem: str) -> None:
    """Cleaning up: what fails there is told and fails nothing else."""
    try:
        work()
    except Exception as error:  # a filesystem that is lost may raise anything
        _log.warning("%s (%s)", problem, reason(error))


def _is_whole(target: Place, facts: Save) -> bool:
    """Whether this very step is saved already; what is there and damaged is moved out of the way."""
    if not target.is_there() or (target.fs is not None and target.size_bytes(RECORD) is None):
        return False
    try:
        same = read_save(target.public).workload_hash == facts.workload_hash
        check_files(target, read_index(target))
    except SaveError:
        same = False
    if not same:
        target.remove()
    return same


def agreeing(where: str, needed: Wholes, saved: dict[str, tuple[int, ...]], strict: bool) -> Wholes:
    """The tensors that both sides have. Raises SaveError for others, if strict, and for other shapes than `saved`."""
    problems = [
        f"{name} is {saved[name]} in it, and {needed[name].shape} here"
        for name in sorted(set(needed) & set(saved))
        if needed[name].shape != saved[name]
    ]
    differ = []
    if missing := sorted(set(needed) - set(saved)):
        differ.append(f"it lacks {_some(missing)}")
    if extra := sorted(set(saved) - set(needed)):
        differ.append(f"it has {_some(extra)}, which this model or optimizer lacks")
    if differ and not strict and _rank() == 0:
        _log.warning("save %s: %s", where, "; ".join(differ))
    problems = [*(differ if strict else ()), *problems]
    if problems:
        remedy = "Take the model and optimizer that it was made with"
        if differ and strict:
            remedy += ", or load with strict=False (--init-partly) what both have"
        raise SaveError(where, "; ".join(problems[:4]), remedy)
    return {name: needed[name] for name in needed if name in saved}


def _some(names: list[str]) -> str:
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
