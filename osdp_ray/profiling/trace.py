"""Model -> bytes: one forward and backward under fake tensors, cut into sections, affine in the micro-batch.

In goes a workload; out come its Structure and a SectionTrace per section class and way to recompute. Only the first
three blocks of a class run, the rest pass through, and the middle one stands for all; two runs with different
micro-batches give every size as `constant + per_sample * micro_batch`. Nothing of the model's size is allocated.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from osdp_ray.errors import TraceError
from osdp_ray.modeling.recompute import recompute_block
from osdp_ray.modeling.structure import Structure, build_structure, find_blocks
from osdp_ray.modeling.stubs import stubbed
from osdp_ray.profiling.recorder import BACKWARD, Recorder, attach_gradient_hook, attach_hooks
from osdp_ray.profiling.sections import cut_sections
from osdp_ray.records.profile import ENTER, Recompute, SectionTrace
from osdp_ray.workload import Workload

_MICRO_BATCHES = (2, 3)
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a trace found: see SectionTrace for `traces`; `buffer_bytes` are the model's own buffers."""

    structure: Structure
    traces: tuple[SectionTrace, ...]
    batch_bytes_per_sample: int
    buffer_bytes: int


def trace(workload: Workload) -> Trace:
    """Traces a workload's model; needs neither a device nor the model's memory. Raises TraceError naming the module."""
    with torch.device("meta"):
        model = workload.build_model()
    blocks = find_blocks(model, workload.blocks)
    batches = [_first_batch(workload, micro_batch) for micro_batch in _MICRO_BATCHES]
    buffer_bytes = sum({id(buffer): buffer.nbytes for buffer in model.buffers()}.values())
    structure: Structure | None = None
    traces: list[SectionTrace] = []
    for recompute in RECOMPUTES:
        recorders = [_record(workload, blocks, recompute, batch) for batch in batches]
        if structure is None:
            structure = build_structure(model, blocks, recorders[0].order)
        traces += cut_sections(structure, recompute, [recorder.events for recorder in recorders], _MICRO_BATCHES)
        if not blocks:
            break
    assert structure is not None
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


def _record(workload: Workload, blocks: tuple[str, ...], recompute: Recompute, batch: Any) -> Recorder:
    """Records one forward and backward with every block recomputed as given."""
    with torch.device("meta"):
        model = workload.build_model()
    mode, recorder = FakeTensorMode(), Recorder()
    _make_fake(model, mode)
    fake_batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
    recorder.own([list(model.parameters()), list(model.buffers()), fake_batch])
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=True)}
    module = "the model"
    with stubbed(model, blocks) as stubs:
        if recompute != "none":
            for name in blocks:
                if name not in stubs:
                    recompute_block(model.get_submodule(name), recompute)
        skipped = tuple(f"{name}." for name in stubs)
        for name, child in model.named_modules():
            owns = any(True for _ in child.parameters(recurse=False))
            if (owns or name == "" or name in blocks) and name not in stubs and not name.startswith(skipped):
                attach_hooks(recorder, name, child)
            elif name in stubs:
                child.register_forward_pre_hook(lambda *_, name=name: recorder.order.append(name))
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            attach_gradient_hook(recorder, parameter, names[id(parameter)])
        try:
            with mode, recorder, _fake_random_state():
                loss = workload.loss(model, fake_batch)
                recorder.mark(BACKWARD, "")
                (loss / 1).backward()  # as the worker does, for accumulation
                del loss
        except (RuntimeError, NotImplementedError, ValueError) as error:
            entered = [event.subject for event in recorder.events if event.code == ENTER]
            module = entered[-1] if entered else ""
            raise TraceError(
                module,
                f"fake tensors cannot run it ({type(error).__name__}: {str(error).splitlines()[0]})",
                "Avoid shapes and branches that depend on values, or register a fake kernel for custom operations",
            ) from error
        finally:
            recorder.recording = False
    return recorder


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces meta parameters and buffers by fake CPU ones in place; ties stay ties."""
    replaced: dict[int, Any] = {}
    originals: list[torch.Tensor] = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    originals.append(tensor)
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replaced[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                tensors[name] = replaced[id(tensor)]


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
