"""Work: what the operations of a trace compute and move, counted under fake tensors, section by section.

An operation's floating-point operations are those of torch's own formulas (`torch.utils.flop_counter`) and of the few
here that it lacks; its bytes are those of the tensors that it reads and writes, each once, as from and to the device's
memory. What only looks at a tensor in another way moves nothing. All figures are `constant + per_sample * micro_batch`.
"""

import dataclasses
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from osdp_ray.errors import TraceError
from osdp_ray.modeling.structure import Structure
from osdp_ray.profiling.memo import Key
from osdp_ray.profiling.sections import Run, representatives, section_spans
from osdp_ray.records.profile import Precision, Recompute

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
)  # they move nothing
_READ_ONLY = ("grads",)  # of fused optimizers, which write them only where a gradient scaler is used
_UNREAD = frozenset((_aten.copy_, _aten.fill_, _aten.zero_, _aten.zeros_like, _aten.ones_like, _aten.full_like))
_LOOKUPS = frozenset((_aten.embedding, _aten.index, _aten.index_select, _aten.gather))  # read as much as they write


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One operation: `constant + per_sample * micro_batch` floating-point operations and bytes."""

    precision: Precision
    flops_constant: float
    flops_per_sample: float
    bytes_constant: float
    bytes_per_sample: float

    def flops(self, micro_batch: int) -> float:
        return max(0.0, self.flops_constant + self.flops_per_sample * micro_batch)

    def num_bytes(self, micro_batch: int) -> float:
        return max(0.0, self.bytes_constant + self.bytes_per_sample * micro_batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionWork:
    """The operations of one forward and one backward of a section of a class, what is recomputed in the backward."""

    class_index: int
    recompute: Recompute
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counted:
    """One operation at one micro-batch. `position` is that of its event; see recorder.Watch."""

    position: int
    name: str
    precision: Precision
    flops: int
    num_bytes: int


class Counter:
    """A recorder's watch that counts every operation."""

    def __init__(self) -> None:
        self.counted: list[_Counted] = []
        self._known: dict[Key, tuple[str, Precision, int, int]] = {}

    def __call__(
        self,
        position: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        key: Key | None = None,
    ) -> None:
        found = self._known.get(key) if key is not None else None
        if found is None:
            num_bytes = operation_bytes(function, args, kwargs, result)
            num_flops = operation_flops(function, args, kwargs, result) if num_bytes else 0
            found = str(function), _precision(args), num_flops, num_bytes
            if key is not None:
                self._known[key] = found
        name, precision, num_flops, num_bytes = found
        if num_bytes:
            self.counted.append(
                _Counted(position=position, name=name, precision=precision, flops=num_flops, num_bytes=num_bytes)
            )


def cut_work(
    structure: Structure, run: Run, counters: list[Counter], micro_batches: tuple[int, int]
) -> list[SectionWork]:
    """One SectionWork per class and way to recompute, of the section that its trace is of.

    `counters` are of runs at `micro_batches`.
    """
    spans = section_spans(structure, run)
    work = _join(counters, micro_batches)
    return [
        SectionWork(
            class_index=index,
            recompute=recompute,
            forward=tuple(item for position, item in work if position in spans[name][0]),
            backward=tuple(item for position, item in work if position in spans[name][1]),
        )
        for (index, recompute), name in representatives(structure, run).items()
    ]


def _join(counters: list[Counter], micro_batches: tuple[int, int]) -> list[tuple[int, Work]]:
    small, large = (counter.counted for counter in counters)
    if [item.name for item in small] != [item.name for item in large]:
        raise TraceError(
            "",
            f"it does other operations at micro-batch {micro_batches[0]} than at {micro_batches[1]}",
            "Avoid branches that depend on the batch's size",
        )
    joined = []
    for one, other in zip(small, large, strict=True):
        flops = _line(one.flops, other.flops, micro_batches)
        num_bytes = _line(one.num_bytes, other.num_bytes, micro_batches)
        work = Work(
            precision=one.precision,
            flops_constant=flops[0],
            flops_per_sample=flops[1],
            bytes_constant=num_bytes[0],
            bytes_per_sample=num_bytes[1],
        )
        joined.append((one.position, work))
    return joined


def _line(one: int, other: int, micro_batches: tuple[int, int]) -> tuple[float, float]:
    slope = (other - one) / (micro_batches[1] - micro_batches[0])
    return one - slope * micro_batches[0], slope


def operation_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of an aten operation, a multiplication and an addition counting two.

    0 for those that memory binds (elementwise ones, norms, reductions).
    """
    packet = function.overloadpacket
    own = _FORMULAS.get(packet)
    if own is not None:
        return own(args, kwargs, result)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def operation_bytes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that an aten operation reads and writes; 0 for views and for what only allocates.

    A tensor that repeats a smaller storage (expanded) is read as that storage; what is changed in place is read and
    written.
    """
    packet = function.overloadpacket
    if packet in _ALLOCATIONS:
        return 0
    inputs = _tensors((args, kwargs))
    outputs = _tensors(result)
    if function._schema.is_mutable:
        written = [
            tensor
            for value, argument in zip(args, function._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in _READ_ONLY
            for tensor in _tensors(value)
        ]
    else:
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        written = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
    if not written:
        return 0
    written_bytes = sum(map(_moved_bytes, written))
    if packet in _LOOKUPS:
        indices = sum(_moved_bytes(tensor) for tensor in inputs if not tensor.is_floating_point())
        return 2 * written_bytes + indices
    read = inputs[1:] if packet in _UNREAD else inputs
    return written_bytes + sum(map(_moved_bytes, read))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _moved_bytes(tensor: torch.Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _precision(args: tuple[Any, ...]) -> Precision:
    """What the operation computes in: the type of its first floating-point operand (others may be statistics)."""
    first = next((tensor for tensor in _tensors(args) if tensor.is_floating_point()), None)
    return "bf16" if first is not None and first.element_size() == 2 else "fp32"


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Two products of [queries, keys] by the head size; a causal mask leaves half of each."""
    return 2 * _one_product(args[0], args[1], _is_causal(args, kwargs, 4))


def _attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Five products: the scores once more, and the gradients of the weights, q, k and v (arXiv 2307.08691)."""
    return 5 * _one_product(args[1], args[2], _is_causal(args, kwargs, 7))


def _is_causal(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> bool:
    return bool(args[position] if len(args) > position else kwargs.get("is_causal", False))


def _one_product(query: torch.Tensor, key: torch.Tensor, causal: bool) -> int:
    """Shapes: [batch, heads, length, head size]."""
    batch, heads, length, size = query.shape
    flops = 2 * batch * heads * length * key.shape[2] * size
    return flops // 2 if causal else flops


def _grouped_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Every row of `a` meets one group's matrix; where both are 2-d, the sum over rows is parted among the groups."""
    a, b = args[:2]
    if a.dim() == 2 and b.dim() == 2:
        return int(2 * a.numel() * b.shape[1])
    return int(2 * a.numel() * b.shape[-1])


_FORMULAS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped_product,
}
