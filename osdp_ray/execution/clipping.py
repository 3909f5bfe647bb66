"""Gradient clipping by global norm over parameters that live on different meshes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their global L2 norm is at most `max_norm`, and returns the norm before.

    Squares of local shards are summed over the ranks that share a parameter, one all-reduce per group of ranks;
    replicated parameters count once (torch's own `clip_grad_norm_` refuses to mix meshes).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    device = _local(gradients[0]).device
    by_group: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_group.setdefault(_shard_group(gradient), []).append(_local(gradient))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for group, locals_ in by_group.items():
        norms = torch._foreach_norm(locals_, 2, dtype=torch.float32)
        squares = torch.stack(norms).square().sum()
        if group is not None:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([_local(gradient) for gradient in gradients], scale)
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_group(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks among which a DTensor is sharded, None where every rank holds all of it."""
    if not isinstance(tensor, DTensor):
        return None
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard) and tensor.device_mesh.size(axis) > 1:
            return tensor.device_mesh.get_group(axis)
    return None
