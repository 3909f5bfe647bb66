"""Workload: what a user brings, a model with its data, loss and optimizer.

The base class below is the contract; modeling.user_code calls its methods. It imports no torch, so that planning from a
profile stays fast.
"""

import hashlib
import importlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp_ray.blame import calling
from osdp_ray.errors import UsageError, WorkloadError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from osdp_ray.records.profile import Precision

_BUILT_IN = {
    "gpt": "osdp_ray.workloads.gpt:gpt",
    "hf": "osdp_ray.workloads.hf:hf",
    "family": "osdp_ray.workloads.families:family",
}


class Workload:
    """A model, its batches, its loss and its optimizer. Subclass it and override the methods that raise.

    Workers receive the object by pickle, so it holds settings and paths, not tensors.
    """

    name: str = "workload"
    precision: "Precision" = "fp32"  # 'bf16': compute in bf16, keep parameters and reduce gradients in fp32
    measure: bool = False  # True: trace real tensors on the CPU, for a model that fake ones cannot run

    def settings(self) -> dict[str, Any]:
        """JSON-ready settings that identify this workload (sizes, data); they go into its hash."""
        return {}

    def build_model(self) -> "nn.Module":
        """The model, with its own initialisation. It is called on the meta device: no values can be read there."""
        raise NotImplementedError(f"{type(self).__name__} needs build_model()")

    def build_batches(self, rank: int, num_ranks: int, micro_batch: int, seed: int, start_step: int) -> "Iterator[Any]":
        """Endless micro-batches of one rank: any nesting of tensors whose first dimension is `micro_batch`.

        Micro-batch k of rank r holds samples `(k * num_ranks + r) * micro_batch` and the `micro_batch - 1` after it, of
        an order that depends on `seed` alone. Then a global batch holds the same samples however it is divided.
        `start_step` is the index k of the first micro-batch to yield.
        """
        raise NotImplementedError(f"{type(self).__name__} needs build_batches()")

    def build_eval_batches(self, rank: int, num_ranks: int, micro_batch: int) -> "Iterable[Any] | None":
        """The held-out micro-batches of one rank, equally many on every rank; None where there are none."""
        return None

    def loss(self, model: "nn.Module", batch: Any) -> "torch.Tensor":
        """The mean loss of a micro-batch over its samples, a scalar."""
        raise NotImplementedError(f"{type(self).__name__} needs loss()")

    def build_optimizer(self, parameters: "Iterable[nn.Parameter]") -> "torch.optim.Optimizer":
        """The optimizer of these parameters (DTensors in training)."""
        raise NotImplementedError(f"{type(self).__name__} needs build_optimizer()")

    def build_scheduler(self, optimizer: "torch.optim.Optimizer", num_steps: int) -> Any:
        """A learning-rate scheduler stepped once per optimizer step, or None."""
        return None

    def export_config(self) -> dict[str, Any] | None:
        """What an export writes as config.json, from which others build the model; None: nothing."""
        return None

    @property
    def blocks(self) -> tuple[str, ...] | None:
        """Module paths of the lists of repeating layers, such as ('transformer.h',); None finds them itself."""
        return None

    def hash(self) -> str:
        """Identifies the workload: its class, its settings and the source of its class.

        Raises WorkloadError where the settings are no JSON.
        """
        kind = type(self)
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            source = ""
        with calling("settings"):
            settings = self.settings()
        try:
            text = json.dumps([kind.__module__, kind.__qualname__, self.precision, settings, source], sort_keys=True)
        except (TypeError, ValueError) as error:
            problem = f"returned what JSON cannot hold ({error})"
            remedy = "Return a dict of names to numbers, texts, and lists and dicts of them."
            raise WorkloadError("settings", problem, place_of_method(self, "settings"), remedy) from error
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def place_of_method(workload: Workload, name: str) -> str:
    """file:line of a method's definition, '' where it has none."""
    method = getattr(workload, name, None)
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)  # type: ignore[arg-type]
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def load_workload(spec: str, arguments: dict[str, str]) -> Workload:
    """The workload named on a command line: 'gpt', or 'package.module:function' that returns one.

    `arguments` are the `key=value` words, converted by the function's annotations (int, float, str, bool).
    Raises UsageError naming what is wrong, and WorkloadError for what the user's module or function raises.
    """
    function = _find_function(spec)
    settings = _convert(function, arguments, spec)
    with calling(f"function {spec}"):
        workload = function(**settings)
    if not isinstance(workload, Workload):
        raise UsageError(f"{spec} returned a {type(workload).__name__}, and an osdp_ray.Workload is needed.")
    return workload


def _find_function(spec: str) -> Callable[..., Any]:
    if spec.endswith(".json") or Path(spec).is_file():
        raise UsageError(
            f"{spec} is a file, and a workload is needed: {', '.join(_BUILT_IN)}, or package.module:function. "
            "From a profile's file 'osdp plan FILE' plans, without --cluster."
        )
    module_name, _, function_name = _BUILT_IN.get(spec, spec).partition(":")
    if not function_name or not module_name or module_name.startswith("."):
        raise UsageError(
            f"no workload is called {spec!r}. Use {', '.join(_BUILT_IN)}, or package.module:function of your own."
        )
    try:
        with calling(f"module {module_name}", passes=lambda error: isinstance(error, ModuleNotFoundError)):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the module {module_name!r} of workload {spec!r} cannot be imported ({error}). "
            "Run from the folder that holds it, or install it."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = f"has no {function_name!r}" if function is None else f"has a {function_name!r} that is no function"
        raise UsageError(f"the module {module_name!r} {problem}. Name a function that returns a Workload.")
    return function


def _convert(function: Callable[..., Any], arguments: dict[str, str], spec: str) -> dict[str, Any]:
    parameters = _signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    converted: dict[str, Any] = {}
    for name, text in arguments.items():
        if name not in named:
            if takes_all:
                converted[name] = text
                continue
            known = ", ".join(named) or "no arguments"
            raise UsageError(f"workload {spec!r} takes no {name!r}. It takes {known}.")
        kind = _single_type(named[name].annotation)
        try:
            if kind is bool:
                converted[name] = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            elif kind in (int, float):
                converted[name] = kind(text)
            else:
                converted[name] = text
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"{name}={text} of workload {spec!r} is no {kind.__name__}. Give {name}={_EXAMPLES[kind]}."
            ) from error
    missing = [
        name for name, parameter in named.items() if parameter.default is parameter.empty and name not in converted
    ]
    if missing:
        raise UsageError(f"workload {spec!r} needs {missing[0]}=VALUE.")
    return converted


_EXAMPLES = {int: "a whole number", float: "a number, such as 0.5", bool: "true or false"}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)  # annotations may be texts, as `annotations` makes them
    except NameError:  # of a name that only type checkers import
        return inspect.signature(function)


def _single_type(annotation: Any) -> Any:
    """The type to read a word as: of `int | None` it is int."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else str
    return annotation
