"""What the workload's optimizer holds and takes, measured on small parameters of a worker's own device."""

import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from osdp_ray.modeling import user_code
from osdp_ray.records.profile import OptimizerCost
from osdp_ray.workload import Workload

_SMALL, _LARGE = 1 << 12, 1 << 16  # elements
_REPEATS = 7


def measure_optimizer(workload: Workload) -> OptimizerCost:
    """State and temporaries in bytes, seconds per byte and per tensor; see OptimizerCost."""
    # 16 small tensors hold as many elements as the large one: what differs is the cost of a tensor.
    one_s, many_s, big_s = (_step_s(workload, sizes) for sizes in ([_SMALL], [_SMALL] * 16, [_LARGE]))
    itemsize = torch.tensor([]).element_size()
    per_tensor_s = max(0.0, (many_s - big_s) / 15)
    per_byte_s = max(0.0, (big_s - one_s) / ((_LARGE - _SMALL) * itemsize))
    constant_s = max(0.0, one_s - per_tensor_s - per_byte_s * _SMALL * itemsize) + _agreement_s()
    return optimizer_bytes(
        workload, step_s_per_byte=per_byte_s, step_s_per_tensor=per_tensor_s, step_constant_s=constant_s
    )


def optimizer_bytes(
    workload: Workload, *, step_s_per_byte: float, step_s_per_tensor: float, step_constant_s: float
) -> OptimizerCost:
    """State and temporaries in bytes, and the seconds given."""
    itemsize = torch.tensor([]).element_size()
    small, large = _state_bytes(workload, _SMALL), _state_bytes(workload, _LARGE)
    per_byte = (large - small) / ((_LARGE - _SMALL) * itemsize)
    # A loop over parameters may hold the temporaries of one while it makes the next one's: four show all of that.
    four, eight = _temporary_bytes(workload, [_LARGE] * 4), _temporary_bytes(workload, [_LARGE] * 8)
    per_total = max(0, eight - four) / (4 * _LARGE * itemsize)
    return OptimizerCost(
        state_bytes_per_byte=per_byte,
        state_bytes_per_tensor=round(small - per_byte * _SMALL * itemsize),
        step_bytes_per_largest=max(0.0, four / (_LARGE * itemsize) - 4 * per_total),
        step_bytes_per_total=per_total,
        step_s_per_byte=step_s_per_byte,
        step_s_per_tensor=step_s_per_tensor,
        step_constant_s=step_constant_s,
    )


def _stepped(workload: Workload, sizes: list[int]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = user_code.build_optimizer(workload, parameters)
    _step(optimizer, parameters)
    return optimizer, parameters


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    user_code.step(optimizer)


def _state_bytes(workload: Workload, size: int) -> int:
    optimizer, _ = _stepped(workload, [size])
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _temporary_bytes(workload: Workload, sizes: list[int]) -> int:
    """Highest bytes that a step (not the first) holds beyond what was there before, from the allocator's events."""
    optimizer, parameters = _stepped(workload, sizes)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # below 6 every profile prints two lines to standard error
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        user_code.step(optimizer)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak if peak >= min(sizes) else 0  # scalars that a step computes are no temporaries


def _step_s(workload: Workload, sizes: list[int]) -> float:
    """Median seconds of clipping and a step on the parameters as training holds them: DTensors, if ranks are joined."""
    parameters: list[nn.Parameter] = [nn.Parameter(_as_held(torch.randn(size))) for size in sizes]
    optimizer = user_code.build_optimizer(workload, parameters)
    seconds = []
    for _ in range(_REPEATS + 1):  # the first makes the state
        gradients = [torch.randn(size) for size in sizes]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = _as_held(gradient)
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        torch._foreach_mul_(gradients, 1 / (1 + torch.stack(torch._foreach_norm(gradients)).norm()))
        user_code.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _as_held(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return tensor
    return DTensor.from_local(tensor, _mesh(), [Shard(0)], run_check=False)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _agreement_s() -> float:
    """Seconds of what ends a step and its clipping: an all-reduce of a few numbers each, whose result is read."""
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return 0.0
    status, seconds = torch.zeros(3), []
    for _ in range(2 * _REPEATS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(2):
            dist.all_reduce(status)
            status.tolist()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
