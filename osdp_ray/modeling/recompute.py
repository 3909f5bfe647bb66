"""Recomputation of a block's activations in backward."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from osdp_ray.records.profile import Recompute

# What 'selective' keeps: the operations whose computing costs more than their memory. All else is cheap to repeat.
_EXPENSIVE_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_EXPENSIVE = frozenset(
    getattr(torch.ops.aten, name).default for name in _EXPENSIVE_NAMES if hasattr(torch.ops.aten, name)
)

# A cache of keys and values would be extended a second time by the recomputation; transformers leaves it out as well.
_WITHOUT_CACHE = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}


def recompute_block(block: nn.Module, recompute: Recompute) -> None:
    """Makes a block run its forward again in backward: all of it ('full'), or all but its matrix products and
    attention, whose outputs it keeps ('selective').

    `forward` itself is replaced on the instance: names of parameters and hooks on the module stay as they are.
    """
    if recompute not in ("selective", "full"):
        raise ValueError(f"recompute={recompute!r} recomputes nothing; use 'selective' or 'full'")
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = _keep_and_reuse

    def recomputed(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs |= {name: value for name, value in _WITHOUT_CACHE.items() if kwargs.get(name)}
        return checkpoint(forward, *args, **options, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]


def _keep_and_reuse() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of the forward and of its repetition.

    torch's own `create_selective_checkpoint_contexts` counts every operation, also those of FSDP2's hooks inside the
    block, which are others in the repetition; here only the expensive ones are looked at, in their order.
    """
    kept: deque[Any] = deque()
    return _Keep(kept), _Reuse(kept)


class _Keep(TorchDispatchMode):
    """Keeps the outputs of expensive operations."""

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _EXPENSIVE:
            # A detached alias: autograd makes the result itself a part of the graph, which would keep itself alive.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                kept = tree_map_only(torch.Tensor, torch.Tensor.detach, result)  # counts changes with its alias
            self.kept.append((function, kept, _versions(kept)))
        return result


class _Reuse(TorchDispatchMode):
    """Gives the kept outputs of expensive operations back, in their order, and repeats all others: also those whose
    outputs were changed after they were kept."""

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kept = self.take(function) if function in _EXPENSIVE else None
        return function(*args, **(kwargs or {})) if kept is None else kept

    def take(self, function: Any) -> Any:
        """What was kept of an operation, which must be the next one; None where it was changed in place since, as by
        `x = self.linear(x); x += y`."""
        if not self.kept or self.kept[0][0] is not function:
            raise RuntimeError(f"recomputation ran {function} where the forward did not: it depends on changing state")
        has_changed = self.has_changed()
        kept = self.kept.popleft()[1]
        return None if has_changed else kept

    def next_dtype(self) -> torch.dtype:
        """The type of the next of what was kept."""
        dtype: torch.dtype = self.kept[0][1].dtype if self.kept else torch.get_default_dtype()
        return dtype

    def has_changed(self) -> bool:
        """Whether the next of what was kept was changed in place since."""
        return bool(self.kept) and _versions(self.kept[0][1]) != self.kept[0][2]


def keep_or_reuse(
    run: Callable[[], torch.Tensor],
    save: Callable[[torch.dtype], torch.Tensor],
    give: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`run()` as one expensive operation, whatever it is made of: its output is kept in forward, and where it is there
    already, `give(save(its type), output)` takes its place. `save` does what backward needs; torch may stop there."""
    for mode in reversed(_get_current_dispatch_mode_stack()):  # torch 2.13
        if isinstance(mode, _Keep):
            result = run()
            kept = result.detach()
            mode.kept.append((keep_or_reuse, kept, _versions(kept)))
            return result
        if isinstance(mode, _Reuse):
            if mode.has_changed():
                mode.take(keep_or_reuse)
                return run()
            saved = save(mode.next_dtype())
            return give(saved, mode.take(keep_or_reuse))
    return run()


def _versions(kept: Any) -> tuple[int, ...]:
    """How often each tensor was changed in place, whoever did it: aliases count together."""
    return tuple(leaf._version for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor))
