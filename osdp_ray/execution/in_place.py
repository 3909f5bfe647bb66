"""Operations in place on what an FSDP unit returns: `x = self.linear(x); x += y`.

FSDP2 (torch 2.13) gathers a unit's parameters again by a hook on its outputs. Where an output is a view, as that of
nn.Linear often is, an operation in place on it drops the hook, and backward fails. Here a second hook sits on the base
of the view, whose place in the graph stays: it gathers where the first one was dropped.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves


def allow_in_place(model: nn.Module) -> None:
    """Hooks every unit of a model that is sharded."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(_hook_bases)


def _hook_bases(module: nn.Module, _: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    for leaf in tree_leaves(output):
        base = leaf._base if isinstance(leaf, torch.Tensor) else None
        if base is None or not leaf.requires_grad or base.grad_fn is None:
            continue
        seen: list[bool] = []
        leaf.register_hook(lambda _, seen=seen: seen.append(True))
        base.register_hook(_gather_unless(seen, module))


def _gather_unless(seen: list[bool], module: nn.Module) -> Any:
    state = module._get_fsdp_state()  # type: ignore[operator]  # torch 2.13

    def hook(gradient: torch.Tensor) -> None:
        if not seen:
            state._pre_backward(gradient)

    return hook
