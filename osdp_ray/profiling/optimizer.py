"""What the workload's optimizer holds and takes, measured on small parameters of a worker's own device."""

import os
import statistics
import time

import torch
from torch import nn

from osdp_ray.modeling import user_code
from osdp_ray.records.profile import OptimizerCost
from osdp_ray.workload import Workload

_SMALL, _LARGE = 1 << 12, 1 << 16  # elements
_REPEATS = 7


def measure_optimizer(workload: Workload) -> OptimizerCost:
    """State and temporaries in bytes, seconds per byte and per tensor; see OptimizerCost."""
    itemsize = torch.tensor([]).element_size()
    many_s, big_s = _step_s(workload, [_SMALL] * 16), _step_s(workload, [_LARGE])
    # 16 small tensors hold as many elements as the large one: what differs is the cost of a tensor.
    per_tensor_s = max(0.0, (many_s - big_s) / 15)
    per_byte_s = max(0.0, big_s - per_tensor_s) / (_LARGE * itemsize)
    return optimizer_bytes(workload, step_s_per_byte=per_byte_s, step_s_per_tensor=per_tensor_s)


def optimizer_bytes(workload: Workload, *, step_s_per_byte: float, step_s_per_tensor: float) -> OptimizerCost:
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
    optimizer, parameters = _stepped(workload, sizes)
    seconds = []
    for _ in range(_REPEATS):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        started = time.perf_counter()
        user_code.step(optimizer)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
