"""Replicated units without FSDP2's copies, for training and for measuring.

torch 2.13 treats a unit whose shard is the whole as any other: it copies parameters before they are used, gradients
into a buffer, and that buffer into another one, and over gloo it waits for every reduction. Here the parameters in use
are the stored ones, or where they are computed with in another type a cast into the buffer that FSDP2 frees after use.
Gradients are reduced where they are, small ones in one buffer, while backward goes on. The mean over ranks of what was
reduced before and a new gradient is the sum of the former and the mean of the latter, so what accumulates is reduced
in place, too.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from osdp_ray.records.plan import FLAT_BELOW_BYTES

_Gradients = deque[tuple[FSDPParam, torch.Tensor]]


def replicate_in_place(module: FSDPModule) -> None:
    """Changes a unit whose group has one rank, right after `fully_shard` made it."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.__class__ = _Replicas
        group._running = []


class _Replicas(FSDPParamGroup):
    """A group of parameters of which every rank has the whole."""

    _running: list[dist.Work]  # reductions

    def wait_for_unshard(self) -> None:
        if not self._all_gather_result:
            return
        if self._training_state == TrainingState.FORWARD and (held := self.comm_ctx.all_gather_state):
            self._wait_all_gather_streams_on_event(held.event)
            self.comm_ctx.all_gather_state = None
        for parameter in self.fsdp_params:
            _take(parameter)
        self._to_unsharded()
        self._all_gather_result = None

    def post_backward(self, *unused: object) -> None:
        if not self._is_plain():
            super().post_backward(*unused)
            return
        self._training_state = TrainingState.POST_BACKWARD
        gradients: _Gradients = deque()
        for parameter in self.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            if not hasattr(parameter, "_unsharded_param"):
                continue
            if parameter.unsharded_accumulated_grad is not None:
                gradients.append((parameter, parameter.unsharded_accumulated_grad_data))
                parameter.unsharded_accumulated_grad = None
            elif parameter.unsharded_param.grad is not None:
                gradients.append((parameter, parameter.unsharded_grad_data))
                parameter.unsharded_param.grad = None
        if self.reshard_after_backward:
            self.reshard()
        self._let_go_of_inputs()
        with torch.no_grad():
            self._reduce(gradients)

    def _let_go_of_inputs(self) -> None:
        """Waits for the reductions of sharded units before, as FSDP2 does, and frees what they reduced."""
        while self.comm_ctx.reduce_scatter_states:
            state = self.comm_ctx.reduce_scatter_states.pop()
            if state.event is not None:
                self.device_handle.current_stream().wait_event(state.event)

    def _is_plain(self) -> bool:
        """Whether nothing else is asked for than means of all gradients, in the type of the parameters."""
        if not self.reduce_grads or not self.all_reduce_grads or self.reduce_scatter_unused_params:
            return False
        dtype = self._reduce_dtype or self.fsdp_params[0].param_dtype or self._orig_dtype
        return self.gradient_divide_factor is None and dtype == self._orig_dtype

    def _reduce(self, gradients: _Gradients) -> None:
        """Empties `gradients`: each becomes the stored parameter's, or is added to the one that is there."""
        small: _Gradients = deque()
        while gradients:
            parameter, gradient = gradients.popleft()
            num_bytes = gradient.numel() * parameter.orig_dtype.itemsize
            if num_bytes < FLAT_BELOW_BYTES or not _owns_storage(gradient):
                small.append((parameter, gradient))
                continue
            gradient = gradient.to(parameter.orig_dtype)
            if parameter.sharded_param.grad is None:
                _store(parameter, gradient)
            else:
                gradient = _stored(parameter).add_(gradient)
            self._start(gradient, [parameter])
        if small:
            self._reduce_flat(small)

    def _reduce_flat(self, gradients: _Gradients) -> None:
        parameters = [parameter for parameter, _ in gradients]
        sizes, device = [gradient.numel() for _, gradient in gradients], gradients[0][1].device
        flat = torch.empty(sum(sizes), dtype=self._orig_dtype, device=device)
        parts = flat.split(sizes)
        torch._foreach_copy_(parts, [gradient.reshape(-1) for _, gradient in gradients])
        gradients.clear()
        for parameter, part in zip(parameters, parts, strict=True):
            whole = part.view(parameter.sharded_size)
            if parameter.sharded_param.grad is not None:
                whole += _stored(parameter)
            _store(parameter, whole)
        self._start(flat, parameters)

    def _start(self, gradients: torch.Tensor, parameters: list[FSDPParam]) -> None:
        """The mean over the replicas, unless there is one."""
        hooks = [(p, hook) for p in parameters for hook in (p.sharded_param._post_accumulate_grad_hooks or {}).values()]
        if isinstance(self.mesh_info, DDPMeshInfo):
            group, op = self.mesh_info.replicate_process_group, dist.ReduceOp.AVG
            work = dist.all_reduce(gradients, op, group=group, async_op=True)
            assert work is not None  # None is for ranks outside of the group
            self._running.append(work)
            if hooks:
                work.wait()
        for parameter, hook in hooks:
            hook(parameter.sharded_param)

    def finalize_backward(self) -> None:
        for work in self._running:
            work.wait()
        self._running.clear()
        super().finalize_backward()


@torch.no_grad()
def _take(parameter: FSDPParam) -> None:
    """Makes the parameter that is in use: the stored one, or its cast into a buffer that FSDP2 frees after use."""
    stored = parameter._sharded_param_data
    if parameter.param_dtype is None or parameter.param_dtype == stored.dtype:
        if hasattr(parameter, "_unsharded_param"):
            if parameter._unsharded_param.data_ptr() == stored.data_ptr():
                return
            del parameter._unsharded_param  # the module was given other tensors meanwhile
        parameter.all_gather_outputs = [stored]
        parameter.init_unsharded_param()
        parameter.all_gather_outputs = []  # nothing to be freed
        return
    parameter.init_all_gather_outputs([stored.numel()], [parameter.param_dtype], 1, stored.device)
    cast = parameter.all_gather_outputs[0]
    alloc_storage(cast)
    with torch.autograd._unsafe_preserve_version_counter(cast):
        cast.copy_(stored)
    parameter.init_unsharded_param()


def _owns_storage(tensor: torch.Tensor) -> bool:
    """Whether nothing else sees the tensor's bytes, such as another gradient that backward has yet to use."""
    storage = tensor.untyped_storage()
    is_alone: bool = torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor's and `storage`
    return is_alone and storage.nbytes() == tensor.nbytes


def _stored(parameter: FSDPParam) -> torch.Tensor:
    """The gradient of earlier micro-batches; there must be one."""
    gradient = parameter.sharded_param.grad
    assert isinstance(gradient, DTensor)
    return gradient._local_tensor


def _store(parameter: FSDPParam, gradient: torch.Tensor) -> None:
    parameter.sharded_param.grad = parameter.to_sharded_dtensor(gradient)
