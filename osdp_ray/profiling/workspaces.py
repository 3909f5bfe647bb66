"""Workspace that CPU kernels allocate inside an operation, which no operation's outputs show.

Sizes are those of torch 2.13's CPU kernels (ATen/native/cpu: FlashAttentionKernel, layer_norm_kernel), found by
comparing traces with the allocator's events. They grow with the threads that a worker computes with; Ray Train gives
a worker as many as it has CPUs, one by default.
"""

from collections.abc import Callable
from typing import Any

import torch

THREADS = 1
_FLOAT_BYTES = 4


def workspace_bytes(function: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that the kernel of an aten operation holds while it runs, 0 for those that hold none."""
    formula = _FORMULAS.get(function)
    return formula(args, result) if formula is not None else 0


def _attention_splits(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int, int]:
    """Rows of queries and keys that one tile holds, and the head size. Shapes: [batch, heads, length, head size]."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2]), query.shape[3]


def _attention_forward(args: tuple[Any, ...], result: Any) -> int:
    rows, columns, head = _attention_splits(args[0], args[1])
    return THREADS * (rows * columns + 2 * rows + rows * head) * _FLOAT_BYTES


def _attention_backward(args: tuple[Any, ...], result: Any) -> int:
    rows, columns, _ = _attention_splits(args[1], args[2])
    return THREADS * (2 * rows * columns + rows) * _FLOAT_BYTES


def _layer_norm_backward(args: tuple[Any, ...], result: Any) -> int:
    normalized = args[2]
    width = 1
    for extent in normalized:
        width *= extent
    return THREADS * 2 * width * _FLOAT_BYTES


_FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm_backward,
}
