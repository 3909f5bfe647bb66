"""What kernels of 16-bit floats hold while they run, measured by running them on this machine's CPU.

Beyond AVX2 oneDNN multiplies 16-bit floats itself, and packs operands into buffers whose sizes follow from blockings
that it chooses shape by shape and processor by processor: of one product 0.5 MB with AMX and 16 MB with plain AVX-512.
No formula tells them, and no two micro-batches tell a third. So a recorder notes what such an operation was called
with, at two micro-batches; here that becomes what it is called with at any, and tensors of just these shapes go through
the kernel itself. Nothing of this happens on processors without such instructions, nor for other types of numbers.
"""

import dataclasses
import functools
import os
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from osdp_ray.records.scratch import KernelScratch
from osdp_ray.units import MIB

Call = tuple[Any, ...]  # an operation and what it was called with, in nested tuples

_aten = torch.ops.aten
_MEASURED = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
)
_PACKED = (torch.bfloat16, torch.float16)
_TENSOR = "tensor"
_MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
# A call that holds or takes more, and all of an operation's larger ones, are left to what was measured before.
_MOST_BYTES, _MOST_S, _LIMIT_S = 256 * MIB, 0.2, 4.0


@functools.cache
def has_packing_kernels() -> bool:
    """Whether this processor has the instructions, and oneDNN may use them (ONEDNN_MAX_CPU_ISA)."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # torch 2.13


def is_measured(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation's scratch has to be measured."""
    return (
        function in _MEASURED
        and has_packing_kernels()
        and any(isinstance(value, torch.Tensor) and value.dtype in _PACKED for value in args)
    )


def call_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """An operation and its arguments without their values: tensors by type, shape, strides and shared storage."""
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunction():
        described = tuple(_described(value, storages) for value in args)
        named = tuple((name, _described(value, storages)) for name, value in kwargs.items())
    return function, described, named


def _described(value: Any, storages: dict[int, int]) -> Any:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        place = storages.setdefault(storage._cdata, len(storages))
        layout = tuple(value.shape), tuple(value.stride()), int(value.storage_offset())
        return _TENSOR, value.dtype, *layout, storage.nbytes(), place
    if isinstance(value, list | tuple):
        return type(value), *(_described(item, storages) for item in value)
    return value


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """An operation as it was called at two micro-batches."""

    small: Call
    large: Call
    micro_batches: tuple[int, int]

    def at(self, micro_batch: int) -> Call:
        """What it is called with at a micro-batch: every number follows a line. Raises ValueError where none does."""
        return _on_line(self.small, self.large, self.micro_batches, micro_batch)


def _on_line(small: Any, large: Any, micro_batches: tuple[int, int], micro_batch: int) -> Any:
    if isinstance(small, tuple) and isinstance(large, tuple) and len(small) == len(large):
        return tuple(_on_line(one, other, micro_batches, micro_batch) for one, other in zip(small, large, strict=True))
    if small == large:
        return small
    if type(small) is not int or type(large) is not int:
        raise ValueError("no number, and another one at another micro-batch")
    per_sample, rest = divmod(large - small, micro_batches[1] - micro_batches[0])
    if rest:
        raise ValueError("not linear in the micro-batch")
    return small + per_sample * (micro_batch - micro_batches[0])


class Kernels:
    """The operations of some runs whose scratch is to be measured, numbered from 1."""

    def __init__(self, micro_batches: tuple[int, int]) -> None:
        self._micro_batches = micro_batches
        self._numbers: dict[_Kernel, int] = {}
        self._of_one_sample: dict[Call, int] = {}

    def number(self, small: Call, large: Call) -> int:
        """The number of what was called so at both micro-batches; 0 where these do not tell how at others.

        A call that is one and the same object was seen at micro-batch 1, which others may tell as well.
        """
        if small is large and small in self._of_one_sample:
            return self._of_one_sample[small]
        kernel = _Kernel(small, large, self._micro_batches)
        if kernel not in self._numbers:
            try:
                alone = kernel.at(1)
            except ValueError:
                return 0
            self._numbers[kernel] = len(self._numbers) + 1
            self._of_one_sample.setdefault(alone, self._numbers[kernel])
        return self._numbers[kernel]

    def measure(self) -> tuple[KernelScratch, ...]:
        """Runs every operation at rising micro-batches, on one thread as a worker does, for some seconds at most."""
        found: dict[_Kernel, list[tuple[int, int]]] = {kernel: [] for kernel in self._numbers}
        known: dict[Call, tuple[int, float]] = {}
        left = set(self._numbers)
        started, num_threads = time.perf_counter(), torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for micro_batch in _MICRO_BATCHES:
                for kernel, points in found.items():
                    if kernel not in left:
                        continue
                    call = kernel.at(micro_batch)
                    if call not in known:
                        is_late = time.perf_counter() - started > _LIMIT_S
                        known[call] = _measured(call) if not is_late and _num_bytes(call) <= _MOST_BYTES else (-1, 0.0)
                    num_bytes, seconds = known[call]
                    if num_bytes >= 0:
                        points.append((micro_batch, num_bytes))
                    if num_bytes < 0 or seconds > _MOST_S or kernel.small == kernel.large:
                        left.discard(kernel)
        finally:
            torch.set_num_threads(num_threads)
        return tuple(KernelScratch(points=tuple(points)) for points in found.values())


def _num_bytes(call: Call) -> int:
    """Bytes of the storages of a call's tensors."""
    return sum(_storages(call).values())


def _storages(part: Any) -> dict[int, int]:
    """Place of a storage -> its bytes."""
    if not isinstance(part, tuple):
        return {}
    if part and part[0] == _TENSOR:
        return {part[6]: part[5]}
    return {place: num_bytes for item in part for place, num_bytes in _storages(item).items()}


def _measured(call: Call) -> tuple[int, float]:
    """(bytes beyond inputs and outputs at the highest, seconds) of a call."""
    function, described, named = call
    storages = {place: torch.zeros(size, dtype=torch.uint8) for place, size in _storages((described, named)).items()}
    args = [_made(value, storages) for value in described]
    kwargs = {name: _made(value, storages) for name, value in named}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # below 6 every profile prints two lines to standard error
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        started = time.perf_counter()
        function(*args, **kwargs)  # the first time makes the kernel itself
        seconds = time.perf_counter() - started
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = function(*args, **kwargs)
    live_bytes = highest_bytes = 0
    for change in _changes(profiler):
        live_bytes += change
        highest_bytes = max(highest_bytes, live_bytes)
    del result
    return highest_bytes - live_bytes, seconds  # what lives on is the result


def _made(value: Any, storages: dict[int, torch.Tensor]) -> Any:
    if not isinstance(value, tuple):
        return value
    if value and value[0] == _TENSOR:
        _, dtype, shape, stride, offset, _, place = value
        return torch.empty(0, dtype=dtype).set_(storages[place].untyped_storage(), offset, shape, stride)
    if value and isinstance(value[0], type):
        return value[0](_made(item, storages) for item in value[1:])
    return value


def _changes(profiler: Any) -> list[int]:
    """Bytes that the CPU's allocator gave out or took back, in the order of time."""
    from torch._C._profiler import _EventType  # torch 2.13: the only access to single events

    events, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        node = stack.pop()
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cpu":
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
        stack += node.children
    return [num_bytes for _, num_bytes in sorted(events)]
