"""Workspace that CPU kernels allocate inside an operation, which no operation's outputs show.

Sizes are those of torch 2.13's CPU kernels (ATen/native/cpu: FlashAttentionKernel, layer_norm_kernel; ATen/native:
what is named at each), found by comparing traces with the allocator's events. They are the highest that is live beyond
the operation's inputs and outputs. They grow with the threads that a worker computes with; Ray Train gives a worker as
many as it has CPUs, one by default.
"""

from collections.abc import Callable
from typing import Any

import torch

THREADS = 1
_FLOAT_BYTES = 4
NUMBER_BYTES = 8  # of a Python number as a tensor: float64 or int64


def workspace_bytes(function: Any, args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """Bytes that the kernel of an aten operation holds while it runs, moment by moment; () for those that hold none.

    Where the highest moment depends on the sizes, each is told, so that every one is affine in the micro-batch.
    """
    formula = _FORMULAS.get(function)
    if formula is None:
        num_bytes = _number_bytes(args, result) if function in _BINARY else 0
        return (num_bytes,) if num_bytes else ()
    found = formula(args, result)
    return found if isinstance(found, tuple) else (found,)


def _number_bytes(args: tuple[Any, ...], result: Any) -> int:
    """A Python number becomes a tensor of float64 or int64, and where the kernel computes in another dtype a copy.

    See TensorIterator.cpp and BinaryOps.cpp.
    """
    for value in args[:2]:
        if isinstance(value, bool | int | float):
            tensor = args[0] if isinstance(args[0], torch.Tensor) else args[1]
            common = torch.result_type(tensor, value) if tensor.dtype != torch.float32 else torch.float32
            own = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
            return own.itemsize + (common.itemsize if common != own else 0)
    return 0


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


def _mean(args: tuple[Any, ...], result: Any) -> int:
    """The sum divided in place by an int64 number (ReduceOps.cpp, mean_kernel_impl's CPU branch)."""
    return NUMBER_BYTES + int(result.element_size())


def _safe_softmax(args: tuple[Any, ...], result: Any) -> int:
    """isneginf of the scores, all of it over rows, and a zero (transformers/attention.cpp, `_safe_softmax`)."""
    scores = args[0]
    rows = scores.numel() // scores.shape[args[1]]
    return int(scores.numel() + rows + result.element_size())


def _cumsum(args: tuple[Any, ...], result: Any) -> int:
    """A copy of the input in the dtype of the result (ReduceOps.cpp, `impl_func_cum_ops`)."""
    return int(result.nbytes) if args[0].dtype != result.dtype else 0


_BLOCK = 16  # channels that oneDNN lays side by side; it copies what has as many into a layout of its own


def _convolution(args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    """oneDNN's copies of input, weight and output in its own layout (as seen in allocator events, groups = 1)."""
    inputs, weight = args[0], args[1]
    copied = inputs.nbytes if inputs.shape[1] >= _BLOCK else 0
    return int(copied + weight.nbytes), int(result.nbytes)


def _convolution_backward(args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    """The same of the output's gradient, input and weight's gradient; without the weight's for a frozen one."""
    gradient, inputs, weight = args[0], args[1], args[2]
    copied = inputs.nbytes if inputs.shape[1] >= _BLOCK else 0
    return int(gradient.nbytes + copied), int(weight.nbytes if result[1] is not None else 0)


def _batch_norm(args: tuple[Any, ...], result: Any) -> int:
    """Sums by channel (Normalization.cpp)."""
    return int(2 * args[0].shape[1] * _FLOAT_BYTES)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offsets: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """The result of `_grouped_mm` on CPU in any dtype; torch's own fake kernel takes bfloat16 alone (GroupedBlas.cpp).

    Rows are padded to 16 bytes.
    """
    if a.dim() == 2 and b.dim() == 2:
        shape = [offsets.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 3 and b.dim() == 3:
        shape = [a.shape[0], a.shape[1], b.shape[2]]
    else:
        shape = [a.shape[-2], b.shape[-1]]
    dtype = out_dtype or a.dtype
    per_row = 16 // dtype.itemsize
    row = -(-shape[-1] // per_row) * per_row
    strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


FAKE_KERNELS: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_product}
_NAMES = ("add", "sub", "mul", "div", "rsub", "eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod", "floor_divide")
_NAMES += ("bitwise_and", "bitwise_or", "bitwise_xor", "maximum", "minimum")
_BINARY = frozenset(
    getattr(packet, overload)
    for name in (*_NAMES, *(f"{name}_" for name in _NAMES))
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for overload in ("Tensor", "Scalar", "default")
    if overload in packet.overloads()
)
_FORMULAS: dict[Any, Callable[[tuple[Any, ...], Any], int | tuple[int, ...]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.cumsum.default: _cumsum,
    torch.ops.aten.mean.default: _mean,
    torch.ops.aten.mean.dim: _mean,
    torch.ops.aten._safe_softmax.default: _safe_softmax,
}
