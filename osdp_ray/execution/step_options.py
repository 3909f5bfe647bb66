"""What a plan decides for whole steps, in FSDP2: how far units are gathered ahead, and over which group reductions run.

FSDP2 gathers one unit ahead in backward, the one that ran before in forward. Where collectives take turns with
computing that hides nothing and holds a flat buffer longer, so a plan may ask for none; or for more than one.
"""

import functools
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from osdp_ray.records.plan import Plan


def apply_step_options(model: nn.Module, plan: Plan) -> None:
    """Sets the options of a model whose units are sharded."""
    if plan.prefetch != 1:
        for group in _groups(model):
            group._backward_prefetch = functools.partial(_gather_ahead, group, plan.prefetch)
    if plan.scatter_group == "own" and isinstance(model, FSDPModule):
        model.set_separate_reduce_scatter_group()


def _groups(model: nn.Module) -> Iterator[FSDPParamGroup]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def _gather_ahead(group: FSDPParamGroup, num_units: int) -> None:
    """`FSDPParamGroup._backward_prefetch` for another number of units than one (torch 2.13)."""
    if group._training_state != TrainingState.PRE_BACKWARD or not group._post_forward_indices:
        return
    index = group._post_forward_indices.pop()
    for ahead in reversed(group.comm_ctx.post_forward_order[max(0, index - num_units) : index]):
        FSDPParamGroup._prefetch_unshard(ahead, "backward")
