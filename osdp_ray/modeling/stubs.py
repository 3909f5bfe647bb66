"""Running a deep model at the cost of a shallow one: repeats of a block pass their input through."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from osdp_ray.modeling.structure import signature

REAL_MEMBERS = 3  # the middle one has a neighbour of its own class on both sides


def real_members(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, bool]:
    """Which blocks run for real: the first three of every class."""
    counts: dict[tuple[object, ...], int] = {}
    real = {}
    for name in blocks:
        key = signature(model.get_submodule(name))
        counts[key] = counts.get(key, 0) + 1
        real[name] = counts[key] <= REAL_MEMBERS
    return real


@contextlib.contextmanager
def stubbed(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[frozenset[str]]:
    """Within the context, blocks beyond the first three of their class hand on what they were given.

    A stub returns the structure that the last real block of its class returned, with every tensor replaced by the
    first of its own inputs of the same shape and dtype. Yields the names of the stubs.
    """
    real = real_members(model, blocks)
    outputs: dict[tuple[object, ...], Any] = {}
    restore: list[tuple[nn.Module, Any]] = []
    handles = []
    for name in blocks:
        block = model.get_submodule(name)
        key = signature(block)
        if real[name]:
            handles.append(block.register_forward_hook(_remember(outputs, key)))
        else:
            restore.append((block, block.__dict__.get("forward")))
            block.forward = _stub(outputs, key)  # type: ignore[method-assign]
    try:
        yield frozenset(name for name in blocks if not real[name])
    finally:
        for handle in handles:
            handle.remove()
        for block, forward in restore:
            if forward is None:
                del block.forward
            else:
                block.forward = forward  # type: ignore[method-assign]


def _remember(outputs: dict[tuple[object, ...], Any], key: tuple[object, ...]) -> Any:
    def hook(_: nn.Module, args: Any, output: Any) -> None:
        # Only shapes are kept: a reference to the output would keep its buffer alive.
        outputs[key] = tree_map(
            lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, output
        )

    return hook


def _stub(outputs: dict[tuple[object, ...], Any], key: tuple[object, ...]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

        def is_shape(value: Any) -> bool:
            return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Size)

        def match(value: Any) -> Any:
            if not is_shape(value):
                return value
            return next((leaf for leaf in given if (leaf.shape, leaf.dtype) == value), None)

        return tree_map(match, outputs[key], is_leaf=is_shape)

    return forward
