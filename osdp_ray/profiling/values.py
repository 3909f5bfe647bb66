"""Values of small integer tensors, kept beside their fake tensors, so that branches which read them can be followed.

Models look at masks and positions ("is any token padding?", "are these positions consecutive?") to choose between
kernels. Such tensors come from the batch, from `arange` and the like: they are small, and what is done to them is done
here for real as well. What comes out of parameters or activations has no value, and reading one is an error.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

MOST_ELEMENTS = 1 << 16
UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException)
_ATTRIBUTE = "_osdp_value"


def remember(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Gives a fake tensor its value, if it is of the kind that has one."""
    if may_have_value(fake):
        setattr(fake, _ATTRIBUTE, real)


def remember_number(fake: torch.Tensor, number: int | float) -> None:
    """The same for a Python number."""
    if may_have_value(fake):
        with _disable_current_modes():
            setattr(fake, _ATTRIBUTE, torch.tensor(number, dtype=fake.dtype))


def copy(fake: torch.Tensor, other: torch.Tensor) -> None:
    """Gives another fake tensor the value of one, if it has one."""
    if hasattr(fake, _ATTRIBUTE):
        setattr(other, _ATTRIBUTE, getattr(fake, _ATTRIBUTE))


def may_have_value(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of the kind whose values are kept: integers or booleans, and few."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= MOST_ELEMENTS


def _real(value: Any) -> Any:
    return getattr(value, _ATTRIBUTE) if isinstance(value, torch.Tensor) else value


def _is_known(leaves: list[Any]) -> bool:
    return all(hasattr(leaf, _ATTRIBUTE) for leaf in leaves if isinstance(leaf, torch.Tensor))


def follow(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Does an operation that was done on fake tensors on their values too, where all of them are known."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if function._schema.is_mutable and args and hasattr(args[0], _ATTRIBUTE):
        if not _is_known(tree_leaves((args, kwargs))) or _is_random(function):
            delattr(args[0], _ATTRIBUTE)
            return
    elif not outputs or not all(map(may_have_value, outputs)) or _is_random(function):
        return
    leaves = tree_leaves((args, kwargs))
    if not _is_known(leaves):
        return
    real = _do(function, args, kwargs)
    for fake, value in zip(
        outputs, (leaf for leaf in tree_leaves(real) if isinstance(leaf, torch.Tensor)), strict=True
    ):
        setattr(fake, _ATTRIBUTE, value)


def read(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation whose shape or value depends on values; raises KeyError where they are not known."""
    if not _is_known(tree_leaves((args, kwargs))):
        raise KeyError(str(function))
    real = _do(function, args, kwargs)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        empty = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        remember(empty, leaf)
        return empty

    return tree_map(fake, real)


def _do(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _disable_current_modes():
        return function(*tree_map(_real, args), **tree_map(_real, kwargs))


def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags
