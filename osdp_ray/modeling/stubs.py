"""Running a deep model at the cost of a shallow one: repeats of a block pass their input through."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from osdp_ray.modeling.structure import kinds_of


def block_rows(model: nn.Module, blocks: tuple[str, ...], kinds: Mapping[str, int] | None = None) -> list[list[str]]:
    """Rows of blocks: those of the same structure in the same list, in order. `kinds`: see structure.kinds_of."""
    kinds = kinds or kinds_of(model, blocks)
    rows: dict[tuple[str, int], list[str]] = {}
    for name in blocks:
        rows.setdefault((name.rpartition(".")[0], kinds[name]), []).append(name)
    return list(rows.values())


def stand_ins(rows: list[list[str]]) -> dict[str, tuple[str, ...]]:
    """Block -> itself and the blocks that it stands for.

    Of every row the first, the second and the last one stand for themselves, since what surrounds a row may change what
    its ends hold; the second one, between its equals, stands for all others, too.
    """
    return {
        name: (name, *row[2:-1]) if index == 1 else (name,)
        for row in rows
        for index, name in enumerate([*row[:2], *row[2:][-1:]])
    }


@contextlib.contextmanager
def stubbed(
    model: nn.Module, blocks: tuple[str, ...], real: Collection[str], kinds: Mapping[str, int] | None = None
) -> Iterator[frozenset[str]]:
    """Within the context, blocks other than the `real` ones hand on what they were given.

    A stub returns what the last real block of its structure returned, with every tensor replaced by the first of its
    own inputs of the same shape and dtype that stands for no other. Yields the names of the stubs.
    """
    kinds = kinds or kinds_of(model, blocks)
    outputs: dict[int, Any] = {}
    restore: list[tuple[nn.Module, Any]] = []
    handles = []
    for name in blocks:
        block, key = model.get_submodule(name), kinds[name]
        if name in real:
            handles.append(block.register_forward_hook(_remember(outputs, key)))
        else:
            restore.append((block, block.__dict__.get("forward")))
            block.forward = _stub(outputs, key)  # type: ignore[method-assign]
    try:
        yield frozenset(name for name in blocks if name not in real)
    finally:
        for handle in handles:
            handle.remove()
        for block, forward in restore:
            if forward is None:
                del block.forward
            else:
                block.forward = forward  # type: ignore[method-assign]


def _remember(outputs: dict[int, Any], key: int) -> Any:
    def hook(_: nn.Module, args: Any, output: Any) -> None:
        # Only shapes are kept: a reference to the output would keep its buffer alive.
        outputs[key] = tree_map(
            lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, output
        )

    return hook


def _stub(outputs: dict[int, Any], key: int) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        unused = list(given)

        def is_shape(value: Any) -> bool:
            return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Size)

        def match(value: Any) -> Any:
            if not is_shape(value):
                return value
            for leaves in (unused, given):
                for index, leaf in enumerate(leaves):
                    if (leaf.shape, leaf.dtype) == value:
                        if leaves is unused:
                            del unused[index]
                        return leaf
            return None

        return tree_map(match, outputs[key], is_leaf=is_shape)

    return forward
