"""Saves: model, optimizer, scheduler, random state and position, written so that any plan and any world reads them.

    <run>/saves/step-00000120/save.json       Save: what it is, scheduler and optimizer settings     (plain JSON)
                              .metadata       torch.distributed.checkpoint's index of tensors and chunks
                              __0_0.distcp    tensor data, one file per rank

Tensors are named `model.<name>`, `optimizer.<key>.<parameter name>` and `random.<device>.<rank>` with the model's own
names and whole shapes; every rank writes the chunks it holds. All happens in a hidden folder that one rename commits,
so that a kill at any moment leaves the saves before it whole.

The index is a pickle (torch 2.13 offers no other form): it is read by an unpickler that knows torch's index classes
and nothing else, and tensor data with `weights_only=True`, so that a foreign save cannot run code.
"""

import dataclasses
import hashlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from osdp_ray.errors import RecordError, SaveError
from osdp_ray.execution.save_files import (
    OTHER_SAVE,
    SafeReader,
    check_files,
    commit,
    drop_old,
    latest_save,
    list_saves,
    make_unfinished,
    read_index,
    save_path,
)
from osdp_ray.records.telemetry import Sample
from osdp_ray.schema import Record, record

__all__ = ["Save", "derive_seed", "latest_save", "list_saves", "load", "read_save", "save"]

_RECORD = "save.json"


@record("save", version=1)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Save(Record):
    """What a save holds beside tensors. `step` steps are done, `num_samples` samples of the data are used up.

    `samples` are those that the driver may not have written yet: where it is killed, they are in no other file.
    `optimizer_groups` are the settings of the optimizer's parameter groups, `optimizer_values` the plain numbers in
    its state by parameter name.
    """

    workload: str
    workload_hash: str
    step: int
    num_samples: int
    seed: int
    num_steps: int
    num_ranks: int
    global_batch: int
    plan_index: int
    first_loss: float | None
    final_loss: float | None
    samples: tuple[Sample, ...] = ()
    scheduler: dict[str, Any] | None = None
    optimizer_groups: tuple[dict[str, Any], ...] = ()
    optimizer_values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def read_save(path: str | os.PathLike[str]) -> Save:
    """The record of a save. Raises SaveError where there is none or it is damaged."""
    if not Path(path, _RECORD).is_file():
        raise SaveError(str(path), f"there is no {_RECORD} in it, so it is no whole save", OTHER_SAVE)
    try:
        return Save.load(Path(path, _RECORD))
    except RecordError as error:
        raise SaveError(str(path), str(error), OTHER_SAVE) from error


def save(
    run_dir: str | os.PathLike[str],
    facts: Save,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    keep: int = 2,
) -> Path:
    """Writes one save of all ranks, which must all call it, and keeps the newest `keep` of the run.

    `facts` comes without scheduler and optimizer settings, which are added here. A whole save of the same step that is
    there already is left as it is. Raises SaveError where it cannot be written; the saves before it stay.
    """
    rank = _rank()
    target, unfinished = save_path(run_dir, facts.step)
    if _agree(_is_whole(target, facts) if rank == 0 else None):
        return target
    tensors, values = _state(model, optimizer)
    tensors |= _random_state(rank)
    facts = dataclasses.replace(
        facts,
        scheduler=None if scheduler is None else _plain("the scheduler", scheduler.state_dict()),
        optimizer_groups=_groups(optimizer),
        optimizer_values=values,
    )
    try:
        if rank == 0:
            make_unfinished(unfinished)
        _barrier()
        # Into one file per rank, flushed to the disk before the index is written.
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished, single_file_per_rank=True, sync_files=True))
        if rank == 0:
            check_files(unfinished, read_index(unfinished))
            facts.save(unfinished / _RECORD)
            commit(unfinished, target)
            drop_old(run_dir, keep)
    except (OSError, dcp.CheckpointException) as error:
        raise SaveError(
            str(target), f"it cannot be written ({_reason(error)})", "Free space there, or give another --out"
        ) from error
    _barrier()
    return target


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    *,
    workload_hash: str,
) -> Save:
    """Fills model, optimizer, scheduler and this rank's random state from a save, whatever plan and world run now.

    A rank that was not there when the save was written gets a random state of its own from (seed, step, rank). Raises
    SaveError for a damaged save, one of another workload, and one whose tensors differ, naming them.
    """
    rank = _rank()
    facts = read_save(path)
    if facts.workload_hash != workload_hash:
        raise SaveError(
            str(path),
            f"it is of workload {facts.workload!r} with hash {facts.workload_hash}, and this one's is {workload_hash}",
            "Resume with the model, data and optimizer settings it was made with, or start anew with another --out",
        )
    index = read_index(Path(path))
    check_files(Path(path), index)
    saved = index.state_dict_metadata
    _allocate_optimizer_state(optimizer, model, saved, facts, path)
    tensors, _ = _state(model, optimizer)
    _check_names(path, tensors, saved)
    own_random = {name: torch.empty_like(t) for name, t in _random_state(rank).items() if name in saved}
    try:
        dcp.load(tensors | own_random, storage_reader=SafeReader(path))
    except (dcp.CheckpointException, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise SaveError(str(path), f"its tensors cannot be read ({_reason(error)})", OTHER_SAVE) from error
    if scheduler is not None and facts.scheduler is not None:
        scheduler.load_state_dict(facts.scheduler)
    _set_groups(optimizer, facts, path)
    _set_random_state(own_random, derive_seed(facts.seed, facts.step, rank))
    return facts


def derive_seed(*parts: int) -> int:
    """A seed of 63 bits that differs wherever any of the parts does."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """All tensors by name, tied ones once, and the plain numbers of the optimizer's state."""
    tensors: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():  # its hooks put gathered parameters back into shards
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[f"model.{name}"] = tensor.detach()
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{name}"] = value.detach()
            elif value is not None:
                values.setdefault(name, {})[key] = _plain(f"optimizer state {key!r} of {name!r}", value)
    return tensors, values


def _random_state(rank: int) -> dict[str, torch.Tensor]:
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(states: dict[str, torch.Tensor], fallback_seed: int) -> None:
    torch.manual_seed(fallback_seed)
    for name, state in states.items():
        if name.startswith("random.cuda."):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def _allocate_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, Any], facts: Save, path: Any
) -> None:
    """Gives every parameter the state tensors that the save has for it, sharded as the parameter is now.

    An optimizer makes them in its first step; taking one only to have them would need a whole set of gradients.
    """
    parameters = dict(model.named_parameters())
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for full_name, stored in saved.items():
        kind, _, rest = full_name.partition(".")
        key, _, name = rest.partition(".")
        parameter = parameters.get(name)
        if kind != "optimizer" or parameter is None or parameter not in groups:
            continue
        if tuple(stored.size) == tuple(parameter.shape) and parameter.dim() > 0:
            tensor = torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
        else:
            # torch's own rule: a step count lives on the CPU unless the update reads it on the device
            on_device = groups[parameter].get("fused") or groups[parameter].get("capturable") or key != "step"
            device = parameter.device if on_device else "cpu"
            tensor = torch.zeros(stored.size, dtype=stored.properties.dtype, device=device)
        optimizer.state[parameter][key] = tensor
    for name, values in facts.optimizer_values.items():
        if name not in parameters:
            raise SaveError(str(path), f"it has optimizer state of {name!r}, which this model lacks", OTHER_SAVE)
        optimizer.state[parameters[name]].update(values)


def _groups(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    groups = []
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key != "params"}
        groups.append({key: _plain(f"optimizer setting {key!r}", value) for key, value in values.items()})
    return tuple(groups)


def _set_groups(optimizer: torch.optim.Optimizer, facts: Save, path: Any) -> None:
    if len(facts.optimizer_groups) != len(optimizer.param_groups):
        found, needed = len(facts.optimizer_groups), len(optimizer.param_groups)
        raise SaveError(
            str(path),
            f"its optimizer has {found} parameter groups, and this one {needed}",
            "Resume with the optimizer that it was made with",
        )
    for group, values in zip(optimizer.param_groups, facts.optimizer_groups, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _plain(what: str, value: Any) -> Any:
    """`value` with scalar tensors as numbers; raises SaveError where JSON could not give it back."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(what, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(what, item) for key, item in value.items()}
    raise SaveError(
        "",
        f"{what} holds a {type(value).__name__}, which a save cannot keep as plain values",
        "Use numbers and tensors",
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _agree(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _reason(error: BaseException) -> str:
    """One line of an error, of the first rank's where torch collected several."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _is_whole(target: Path, facts: Save) -> bool:
    """Whether this very step is saved already; what is there and damaged is moved out of the way."""
    if not target.exists():
        return False
    try:
        same = read_save(target).workload_hash == facts.workload_hash
        check_files(target, read_index(target))
    except SaveError:
        same = False
    if not same:
        shutil.rmtree(target)
    return same


def _check_names(path: Any, tensors: dict[str, Any], saved: dict[str, Any]) -> None:
    needed, found = set(tensors), {name for name in saved if not name.startswith("random.")}
    problems = []
    if missing := sorted(needed - found):
        problems.append(f"it lacks {_some(missing)}")
    if extra := sorted(found - needed):
        problems.append(f"it has {_some(extra)}, which this model or optimizer lacks")
    for name in sorted(needed & found):
        if tuple(tensors[name].shape) != tuple(saved[name].size):
            problems.append(f"{name} is {tuple(saved[name].size)} in it, and {tuple(tensors[name].shape)} here")
    if problems:
        raise SaveError(str(path), "; ".join(problems[:4]), "Resume with the model and optimizer that it was made with")


def _some(names: list[str]) -> str:
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
