"""Model -> bytes: one forward and backward under fake tensors, cut into sections, affine in the micro-batch.

In goes a workload; out come its Structure and a SectionTrace per section class and way to recompute. Only the first
three blocks of a class run, the rest pass through, and the middle one stands for all; two runs with different
micro-batches give every size as `constant + per_sample * micro_batch`. Nothing of the model's size is allocated.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from osdp_ray.errors import TraceError
from osdp_ray.modeling.materialize import build_bare
from osdp_ray.modeling.recompute import recompute_block
from osdp_ray.modeling.structure import Structure, build_structure, find_blocks
from osdp_ray.modeling.stubs import stubbed
from osdp_ray.profiling.recorder import BACKWARD, Recorder, attach_gradient_hook, attach_hooks
from osdp_ray.profiling.sections import cut_sections
from osdp_ray.records.profile import Recompute, SectionTrace
from osdp_ray.workload import Workload

_MICRO_BATCHES = (2, 3)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a trace found: see SectionTrace for `traces`; `buffer_bytes` are the model's own buffers."""

    structure: Structure
    traces: tuple[SectionTrace, ...]
    batch_bytes_per_sample: int
    buffer_bytes: int


def trace(workload: Workload) -> Trace:
    """Traces a workload's model; needs neither a device nor the model's memory. Raises TraceError naming the module."""
    model = build_bare(workload)
    blocks = find_blocks(model, workload.blocks)
    batches = [_first_batch(workload, micro_batch) for micro_batch in _MICRO_BATCHES]
    buffer_bytes = sum({id(buffer): buffer.nbytes for buffer in model.buffers()}.values())
    recorded: dict[Recompute, list[Recorder]] = {}
    with stubbed(model, blocks) as stubs, _Subject(workload, model, blocks, stubs) as subject:
        for recompute in RECOMPUTES if blocks else RECOMPUTES[:1]:
            recorded[recompute] = [subject.record(recompute, batch) for batch in batches]
    structure = build_structure(model, blocks, recorded["none"][0].order)
    traces: list[SectionTrace] = []
    for recompute, recorders in recorded.items():
        traces += cut_sections(structure, recompute, [recorder.events for recorder in recorders], _MICRO_BATCHES)
    return Trace(
        structure=structure,
        traces=tuple(traces),
        batch_bytes_per_sample=_bytes_per_sample(batches),
        buffer_bytes=buffer_bytes,
    )


def _first_batch(workload: Workload, micro_batch: int) -> Any:
    batch = next(iter(workload.build_batches(0, 1, micro_batch, 0, 0)), None)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise TraceError("", "build_batches yielded no tensors", "Yield a tensor, or tuples or dicts of tensors")
    return batch


def _bytes_per_sample(batches: list[Any]) -> int:
    small, large = (
        sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)) for batch in batches
    )
    difference = _MICRO_BATCHES[1] - _MICRO_BATCHES[0]
    per_sample, rest = divmod(large - small, difference)
    if rest or small != per_sample * _MICRO_BATCHES[0]:
        raise TraceError(
            "",
            "batches do not grow in proportion to the micro-batch",
            "Yield tensors whose first dimension is the micro-batch and whose other dimensions are fixed",
        )
    return per_sample


class _Subject:
    """A model made ready for recording: within the context its real blocks are fake, its stubs stay on meta."""

    def __init__(self, workload: Workload, model: nn.Module, blocks: tuple[str, ...], stubs: frozenset[str]) -> None:
        self.workload, self.model, self.blocks, self.stubs = workload, model, blocks, stubs
        self.mode = FakeTensorMode()
        inside = tuple(f"{name}." for name in stubs)
        self.modules = [
            (name, module)
            for name, module in model.named_modules()
            if name not in stubs and not name.startswith(inside)
        ]
        dtype = torch.bfloat16 if workload.precision == "bf16" else None
        self.originals = _make_fake([module for _, module in self.modules], self.mode, dtype)
        self.parameters = {
            id(parameter): (f"{name}.{key}" if name else key, parameter)
            for name, module in reversed(self.modules)
            for key, parameter in module.named_parameters(recurse=False)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tensors, name, tensor in self.originals:
            tensors[name] = tensor

    def record(self, recompute: Recompute, batch: Any) -> Recorder:
        """Records one forward and backward with every block recomputed as given."""
        recorder = Recorder()
        fake = tree_map(lambda leaf: self.mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        tensors = [
            tensor for _, module in self.modules for tensor in (*module._parameters.values(), *module._buffers.values())
        ]
        recorder.own([tensors, fake])
        real = [self.model.get_submodule(name) for name in self.blocks if name not in self.stubs]
        if recompute != "none":
            for block in real:
                recompute_block(block, recompute)
        handles = self._attach(recorder)
        try:
            self._run(recorder, fake)
        finally:
            recorder.recording = False
            for handle in handles:
                handle.remove()
            for _, parameter in self.parameters.values():
                parameter.grad = None
            if recompute != "none":
                for block in real:
                    del block.forward
        return recorder

    def _attach(self, recorder: Recorder) -> list[Any]:
        handles = []
        for name, module in self.modules:
            if name == "" or name in self.blocks or any(True for _ in module.parameters(recurse=False)):
                handles += attach_hooks(recorder, name, module)
        for name in self.stubs:
            stub = self.model.get_submodule(name)
            handles.append(stub.register_forward_pre_hook(lambda *_, name=name: recorder.order.append(name)))
        for name, parameter in self.parameters.values():
            if parameter.requires_grad:
                handles.append(attach_gradient_hook(recorder, parameter, name))
        return handles

    def _run(self, recorder: Recorder, batch: Any) -> None:
        try:
            with self.mode, recorder, _fake_random_state():
                loss = self.workload.loss(self.model, batch)
                recorder.mark(BACKWARD, "")
                (loss / 1).backward()  # as the worker does, for accumulation
                del loss
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise TraceError(
                recorder.order[-1] if recorder.order else "",
                f"fake tensors cannot run it ({type(error).__name__}: {str(error).splitlines()[0]})",
                "Avoid shapes and branches that depend on values, or register a fake kernel for custom operations",
            ) from error


def _make_fake(
    modules: list[nn.Module], mode: FakeTensorMode, dtype: torch.dtype | None
) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Replaces the modules' meta parameters and buffers by fake CPU ones in place; ties stay ties.

    Floating-point parameters get the type that is computed with, as FSDP2 gathers them; buffers stay as they are.
    Returns what was replaced, and where.
    """
    replaced: dict[int, Any] = {}
    originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                originals.append((tensors, name, tensor))
                if id(tensor) not in replaced:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    cast = dtype is not None and is_parameter and tensor.is_floating_point()
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, device="cpu")
                    replaced[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                tensors[name] = replaced[id(tensor)]
    return originals


@contextlib.contextmanager
def _fake_random_state() -> Iterator[None]:
    """Lets recomputation stash the CPU generator's state as fake tensors, so that the recorder sees them."""
    num_bytes = torch.get_rng_state().numel()
    saved = torch.get_rng_state, torch.set_rng_state
    torch.get_rng_state = lambda: torch.empty(num_bytes, dtype=torch.uint8)
    torch.set_rng_state = lambda _: None
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = saved
