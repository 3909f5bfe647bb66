"""Whether the state that a save would hold is finite on all ranks: a loss tells only of the state before the update."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def is_finite(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """The same answer on every rank, by one all-reduce. Reads every shard once and holds nothing of their size."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = [tensor for tensor in (*parameters, *state) if isinstance(tensor, torch.Tensor)]
    shards = [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]
    shards = [shard for shard in shards if shard.is_floating_point() and shard.numel()]
    total = torch.zeros((), device=device)
    for shard in shards:  # 0 times a finite number is 0, and nan else
        total += (torch.linalg.vector_norm(shard, ord=math.inf) * 0).to(total)
    if dist.is_initialized():
        dist.all_reduce(total)
    return math.isfinite(total.item())
