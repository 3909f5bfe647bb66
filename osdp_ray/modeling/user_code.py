"""The one place that calls the methods of a user's workload, and looks at what they give.

Every function here calls the method of its name. Raises WorkloadError with the user's file and line where it raises,
and where what it gives cannot be trained with. What a machine does to the user's code (memory that ran out, a broken
connection) is raised as it is.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from osdp_ray.blame import MEND, calling
from osdp_ray.errors import UsageError, WorkloadError
from osdp_ray.workload import Workload, place_of_method

BROKEN_CONNECTION = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "nccl error",
    "timed out waiting",
)
_HEADROOM = ("can't allocate memory", "not enough memory", "out of memory")
_COLLECTIVES = str(Path(torch.__file__).parent / "distributed")
_REHEARSED_STEPS = 100
_END = object()
_MODEL_REMEDY = f"{MEND[:-1]}; it is called on the meta device, where no values can be read."
_OPTIMIZER_REMEDY = f"{MEND[:-1]}; it must take any list of parameters, for profiling gives it some vectors."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _HEADROOM)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether memory or a connection failed in the user's code, rather than the code itself."""
    if is_out_of_memory(error) or any(words in str(error).lower() for words in BROKEN_CONNECTION):
        return True
    trail = error.__traceback__
    while trail is not None and trail.tb_next is not None:
        trail = trail.tb_next
    return trail is not None and trail.tb_frame.f_code.co_filename.startswith(_COLLECTIVES)


def build_model(workload: Workload) -> nn.Module:
    with calling("build_model", remedy=_MODEL_REMEDY, passes=is_of_the_machine):
        model = workload.build_model()
    if not isinstance(model, nn.Module):
        raise _returned(workload, "build_model", model, "Return a torch.nn.Module.")
    return model


def blocks(workload: Workload) -> tuple[str, ...] | None:
    with calling("blocks"):
        paths = workload.blocks
        if paths is None:
            return None
        if not isinstance(paths, str):
            paths = tuple(paths)
    if isinstance(paths, str) or not all(isinstance(path, str) for path in paths):
        raise _returned(workload, "blocks", paths, "Return a tuple of paths, such as ('layers',), or None.")
    return paths


def batches(
    workload: Workload, rank: int, num_ranks: int, micro_batch: int, seed: int, start_step: int
) -> Iterator[Any]:
    """The micro-batches of `build_batches`, each with a tensor in it. Raises WorkloadError where they end."""
    method = "build_batches"
    with calling(method, passes=is_of_the_machine):
        given = workload.build_batches(rank, num_ranks, micro_batch, seed, start_step)
    if not isinstance(given, Iterable):
        raise _returned(workload, method, given, "Yield batches from it, without end.")
    with calling(method, passes=is_of_the_machine):
        iterator = iter(given)
    number = start_step
    while True:
        with calling(method, passes=is_of_the_machine):
            batch = next(iterator, _END)
        if batch is _END:
            raise WorkloadError(
                method,
                f"ended at micro-batch {number} of rank {rank} (the first one is 0)",
                place_of_method(workload, method),
                "It must be endless: begin anew where the data is used up.",
            )
        _check_batch(workload, method, batch)
        yield batch
        number += 1


def eval_batches(workload: Workload, rank: int, num_ranks: int, micro_batch: int) -> Iterator[Any] | None:
    """The held-out micro-batches, each with a tensor in it; None where there are none."""
    method = "build_eval_batches"
    with calling(method, passes=is_of_the_machine):
        given = workload.build_eval_batches(rank, num_ranks, micro_batch)
    if given is None:
        return None
    if not isinstance(given, Iterable):
        raise _returned(workload, method, given, "Return batches, or None.")
    return _checked(workload, method, given)


def _checked(workload: Workload, method: str, given: Iterable[Any]) -> Iterator[Any]:
    with calling(method, passes=is_of_the_machine):
        iterator = iter(given)
    while True:
        with calling(method, passes=is_of_the_machine):
            batch = next(iterator, _END)
        if batch is _END:
            return
        _check_batch(workload, method, batch)
        yield batch


def _check_batch(workload: Workload, method: str, batch: Any) -> None:
    leaves = tree_leaves(batch)
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return
    if any(isinstance(leaf, np.ndarray) for leaf in leaves):
        problem, remedy = "yielded numpy arrays", "Yield torch tensors, by torch.from_numpy(array)."
    else:
        problem = f"yielded no tensors, but {_brief(batch)}"
        remedy = "Yield a tensor, or tuples, lists or dicts of tensors."
    raise WorkloadError(method, problem, place_of_method(workload, method), remedy)


def loss(
    workload: Workload,
    model: nn.Module,
    batch: Any,
    *,
    needs_gradient: bool = True,
    passes: Callable[[BaseException], bool] = is_of_the_machine,
) -> torch.Tensor:
    with calling("loss", passes=passes):
        value = workload.loss(model, batch)
    if not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
        raise _returned(workload, "loss", value, "Return the mean loss of the micro-batch, one number as a tensor.")
    if needs_gradient and not value.requires_grad:
        raise WorkloadError(
            "loss",
            "returned a number that depends on no parameter that is trained",
            place_of_method(workload, "loss"),
            "Compute it from the model's output without detach() or no_grad(), and let parameters require gradients.",
        )
    return value


def backward(loss: torch.Tensor) -> None:
    with calling("loss", doing="raised in backward", passes=is_of_the_machine):
        loss.backward()


def build_optimizer(workload: Workload, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of some of the parameters, and of no others."""
    method = "build_optimizer"
    with calling(method, remedy=_OPTIMIZER_REMEDY, passes=is_of_the_machine):
        optimizer = workload.build_optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _returned(workload, method, optimizer, "Return a torch.optim.Optimizer.")
    given = {id(parameter) for parameter in parameters}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_others = sum(id(parameter) not in given for parameter in held)
    if num_others or not held:
        what = f"{num_others} parameters that it was not given" if num_others else "no parameters"
        raise WorkloadError(
            method,
            f"returned an optimizer of {what}, which would not train the model",
            place_of_method(workload, method),
            "Make it of the parameters that the method is given.",
        )
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer that the workload built."""
    doing = "gave an optimizer whose step() raised"
    with calling("build_optimizer", doing=doing, remedy=_OPTIMIZER_REMEDY, passes=is_of_the_machine):
        optimizer.step()


def build_scheduler(workload: Workload, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    """A scheduler of this optimizer whose step() needs no arguments, or None."""
    method = "build_scheduler"
    with calling(method):
        scheduler = workload.build_scheduler(optimizer, num_steps)
    if scheduler is None:
        return None
    methods = ("step", "state_dict", "load_state_dict")
    if isinstance(scheduler, type) or not all(callable(getattr(scheduler, name, None)) for name in methods):
        remedy = "Return a scheduler of torch.optim.lr_scheduler, or None."
        raise _returned(workload, method, scheduler, remedy)
    needed = [
        parameter.name
        for parameter in inspect.signature(scheduler.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise WorkloadError(
            method,
            f"returned a {type(scheduler).__name__}, whose step() needs {' and '.join(map(repr, needed))}, and it is "
            "called after every step without any",
            place_of_method(workload, method),
            "Return a scheduler that follows the number of steps alone, such as LambdaLR or CosineAnnealingLR.",
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        problem = f"returned a {type(scheduler).__name__} of another optimizer"
        place = place_of_method(workload, method)
        raise WorkloadError(method, problem, place, "Make it of the optimizer that the method is given.")
    return scheduler


def rehearse(workload: Workload) -> None:
    """Builds optimizer and scheduler once over a small parameter, so that what is wrong there is known at once."""
    if workload.precision not in ("fp32", "bf16"):
        raise UsageError(f"the workload's precision is {workload.precision!r}. Set it to 'fp32' or 'bf16'.")
    optimizer = build_optimizer(workload, [nn.Parameter(torch.zeros(2)) for _ in range(2)])
    build_scheduler(workload, optimizer, _REHEARSED_STEPS)


def _returned(workload: Workload, method: str, value: Any, remedy: str) -> WorkloadError:
    return WorkloadError(method, f"returned {_brief(value)}", place_of_method(workload, method), remedy)


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
