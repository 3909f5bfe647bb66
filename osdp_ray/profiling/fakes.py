"""A model's tensors as fake ones, and what else must look real to a model that runs under fake tensors."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.profiling import values
from osdp_ray.workload import Workload


def small_values(workload: Workload, modules: list[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """Values of the small integer buffers (positions, masks), which branches may read."""
    names = [
        f"{name}.{key}" if name else key
        for name, module in modules
        for key, buffer in module.named_buffers(recurse=False)
        if values.may_have_value(buffer)
    ]
    if not names:
        return {}
    _, initialisation = build_on_meta(workload)
    return {name: initialisation.whole(name, "cpu", 0) for name in names if initialisation.is_known(name)}


_Make = Callable[[str, torch.Tensor, torch.dtype], torch.Tensor]


def fakes_of(workload: Workload, modules: list[tuple[str, nn.Module]], mode: FakeTensorMode) -> _Make:
    """Makes fake CPU tensors in the place of a model's."""
    known = small_values(workload, modules)

    def make(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with mode:
            fake = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        if name in known:
            values.remember(fake, known[name])
        return fake

    return make


def reals_of(workload: Workload) -> _Make:
    """Makes real CPU tensors with the model's own initial values."""
    _, initialisation = build_on_meta(workload)

    def make(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return initialisation.whole(name, "cpu", 0).detach().to(dtype, copy=True)

    return make


def replace_tensors(
    modules: list[tuple[str, nn.Module]], make: _Make, dtype: torch.dtype | None
) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Replaces the modules' meta parameters and buffers in place; ties stay ties.

    Floating-point parameters get the type that is computed with, as FSDP2 gathers them; buffers stay as they are.
    Returns what was replaced, and where.
    """
    replaced: dict[int, Any] = {}
    originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for path, module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                originals.append((tensors, name, tensor))
                if id(tensor) not in replaced:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    cast = dtype is not None and is_parameter and tensor.is_floating_point()
                    made = make(f"{path}.{name}" if path else name, tensor, dtype if cast else tensor.dtype)
                    replaced[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
                tensors[name] = replaced[id(tensor)]
    return originals


def stored_before_use(
    modules: list[tuple[str, nn.Module]],
    originals: list[tuple[dict[str, Any], str, torch.Tensor]],
    mode: contextlib.AbstractContextManager[Any],
    dtype: torch.dtype | None,
) -> list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
    """Of parameters that are gathered in another type: where they are, the gathered one, and one as it is stored.

    Those of the model itself are gathered as soon as it runs.
    """
    own = {id(module._parameters) for name, module in modules if not name}
    found = []
    for tensors, key, original in originals:
        gathered = tensors[key]
        if dtype is None or gathered.dtype == original.dtype or id(tensors) in own:
            continue
        with mode:
            stored = torch.empty(original.shape, dtype=original.dtype, device="cpu")
        found.append((tensors, key, gathered, nn.Parameter(stored, original.requires_grad)))
    return found


@contextlib.contextmanager
def seen_random_state() -> Iterator[None]:
    """Lets recomputation stash the CPU generator's state as a tensor that the recorder sees, whatever is in it."""
    num_bytes = torch.get_rng_state().numel()
    saved = torch.get_rng_state, torch.set_rng_state
    torch.get_rng_state = lambda: torch.empty(num_bytes, dtype=torch.uint8)
    torch.set_rng_state = lambda _: None
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = saved


@contextlib.contextmanager
def real_branches() -> Iterator[None]:
    """Lets transformers take the branches of a real run: it looks for fake tensors, and then reads no mask's values."""
    module = sys.modules.get("transformers.utils.import_utils")
    saved = getattr(module, "is_fake_tensor", None)
    if saved is None:
        yield
        return
    module.is_fake_tensor = lambda _: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        module.is_fake_tensor = saved  # type: ignore[union-attr]
