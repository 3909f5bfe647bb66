"""A reduce-scatter over gloo that moves as much as a gather, for FSDP2's custom collectives and for measuring.

gloo's own moves as much as an all-reduce, and works on a copy of the input. This one is a ring: with n ranks, in step
k = 1 .. n - 1, a rank sends the partial sum of chunk `rank - k` to the next rank, and adds to its chunk `rank - k - 1`
the one that the rank before sent. So (n - 1) / n of the input leaves every rank, half of what an all-reduce sends.
Large chunks go in two pieces: one is summed and sent on while the other is under way, which keeps the wires busy (a
fifth less time between nodes; more pieces gained nothing). Sums build up in the input itself and what arrives lands in
the output: nothing is allocated. The order of the ranks decides which links are crossed: neighbours in the group are
neighbours in the ring, as in gloo's gather.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # torch 2.13
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from osdp_ray.units import KIB

_PIECES = 2
_LEAST_PIECE_BYTES = 64 * KIB  # smaller ones cost more calls than they save time
_RING_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def ring_reduce_scatter(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduces `whole` over the ranks of a group into `output`, this rank's chunk of it. `whole` is used up."""
    num_ranks, rank = group.size(), group.rank()
    chunks = whole.view(num_ranks, -1)
    received = output.view(-1)
    following = dist.get_global_rank(group, (rank + 1) % num_ranks)
    before = dist.get_global_rank(group, (rank - 1) % num_ranks)
    num_pieces = _PIECES if received.nbytes >= _LEAST_PIECE_BYTES * _PIECES else 1
    spaces = received.tensor_split(num_pieces)
    arriving = [_receive(space, before, group) for space in spaces]
    leaving = [_send(piece, following, group) for piece in chunks[(rank - 1) % num_ranks].tensor_split(num_pieces)]
    for step in range(1, num_ranks):
        pieces = chunks[(rank - step - 1) % num_ranks].tensor_split(num_pieces)
        for index, piece in enumerate(pieces):
            arriving[index].wait()
            piece.add_(spaces[index])
            if step < num_ranks - 1:
                arriving[index] = _receive(spaces[index], before, group)
                leaving.append(_send(piece, following, group))
    for sent in leaving:
        sent.wait()
    if op == dist.ReduceOp.AVG:
        torch.div(chunks[rank], num_ranks, out=received)
    else:
        received.copy_(chunks[rank])


def _receive(space: torch.Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    work = dist.irecv(space, source, group=group)
    assert work is not None  # None is for ranks outside of the group
    return work


def _send(piece: torch.Tensor, target: int, group: dist.ProcessGroup) -> dist.Work:
    work = dist.isend(piece, target, group=group)
    assert work is not None
    return work


class RingReduceScatter(ReduceScatter):
    """The same as FSDP2 wants it. Reductions that are neither sum nor mean go to the backend's own."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op not in _RING_OPS or async_op or group.size() == 1:
            return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        ring_reduce_scatter(output_tensor, input_tensor, group, op)
        return None


def scatter_in_rings(model: nn.Module) -> None:
    """Lets the units of a model over gloo scatter so, those that have no scatter of their own."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if isinstance(group._reduce_scatter_comm, DefaultReduceScatter):
                    group._reduce_scatter_comm = RingReduceScatter()
