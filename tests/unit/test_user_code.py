"""What is wrong with the user's own code is said by method, exception, file and line; the exception is the cause."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from osdp_ray.catalogue import load_hardware
from osdp_ray.errors import DataError, OsdpError, UsageError, WorkloadError
from osdp_ray.execution import worker
from osdp_ray.modeling import user_code
from osdp_ray.profiling import estimate, profile, trace
from osdp_ray.profiling.compute import measure_compute
from osdp_ray.profiling.estimate import optimizer_cost
from osdp_ray.profiling.optimizer import measure_optimizer
from tests.models import Built, plain_stack

HERE = rf"\({__file__}:\d+\)"


def broken(error=None):
    raise error or ValueError("no such size")


class Given(Built):
    """The plain workload with some of its methods replaced by functions."""

    def __init__(self, **methods):
        super().__init__(plain_stack)
        vars(self).update(methods)


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


def other_optimizer(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer_of([nn.Parameter(torch.zeros(1))]), lambda step: 1.0)


def plateau(optimizer, num_steps):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def one_batch(rank, num_ranks, micro_batch, seed, start_step):
    yield torch.zeros(micro_batch, 4, dtype=torch.int64)


def raising_batches(*_):
    yield torch.zeros(1)
    broken()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"build_model": broken},
            rf"build_model raised ValueError: no such size {HERE}\. Mend .* meta device",
        ),
        ({"build_model": lambda: 3}, rf"build_model returned 3 {HERE}\. Return a torch\.nn\.Module"),
        ({"loss": lambda model, batch: broken()}, rf"loss raised ValueError: no such size {HERE}\. Mend it there"),
        ({"loss": lambda model, batch: batch["x"]}, rf"loss raised \w+: .* {HERE}"),
        ({"loss": lambda model, batch: None}, rf"loss returned None {HERE}\. Return the mean loss"),
        (
            {"loss": lambda model, batch: model(batch)},
            r"returned a tensor of shape \(2, 16, 50\) and type float32",
        ),
        (
            {"loss": lambda model, batch: model(batch).mean()[None]},
            r"a tensor of shape \(1,\) .* one number",
        ),
        ({"loss": lambda model, batch: torch.tensor(3)}, r"a tensor of shape \(\) and type int64"),
        ({"loss": lambda model, batch: model(batch).detach().mean()}, r"depends on no parameter .* without detach\(\)"),
        ({"build_optimizer": lambda parameters: broken()}, rf"build_optimizer raised ValueError: no such size {HERE}"),
        (
            {"build_optimizer": lambda parameters: optimizer_of([])},
            r"raised ValueError: optimizer got an empty",
        ),
        ({"build_optimizer": lambda parameters: "sgd"}, rf"returned 'sgd' {HERE}\. Return a torch\.optim\.Optimizer"),
        (
            {"build_optimizer": lambda parameters: optimizer_of(plain_stack().parameters())},
            r"an optimizer of \d+ parameters that it was not given, which would not train .* Make it of the parameters",
        ),
        (
            {"build_optimizer": lambda parameters: optimizer_of([{"params": []}])},
            r"an optimizer of no parameters, which would not train the model",
        ),
        (
            {"build_optimizer": lambda ps: NeedsClosure(ps, lr=1)},
            r"whose step\(\) raised TypeError: .*closure",
        ),
        ({"build_scheduler": lambda optimizer, num_steps: broken()}, rf"build_scheduler raised ValueError: .* {HERE}"),
        ({"build_scheduler": lambda optimizer, num_steps: 0.5}, r"build_scheduler returned 0\.5 .* or None"),
        ({"build_scheduler": plateau}, r"ReduceLROnPlateau, whose step\(\) needs 'metrics'.* such as LambdaLR"),
        ({"build_scheduler": other_optimizer}, r"a LambdaLR of another optimizer .* that the method is given"),
        ({"build_batches": lambda *_: broken()}, rf"build_batches raised ValueError: no such size {HERE}"),
        ({"build_batches": raising_batches}, rf"build_batches raised ValueError: no such size {HERE}"),
        ({"build_batches": lambda *_: None}, r"build_batches returned None .* Yield batches from it, without end"),
        ({"build_batches": lambda *_: iter(())}, rf"ended at micro-batch 0 of rank 0 .*{HERE}\. It must be endless"),
        ({"build_batches": one_batch}, r"ended at micro-batch 1 of rank 0 .* begin anew where the data is used up"),
        ({"build_batches": lambda *_: iter([3, 3])}, r"yielded no tensors, but 3 .* Yield a tensor"),
        (
            {"build_batches": lambda *_: iter([np.zeros(3)] * 2)},
            r"yielded numpy arrays .* by torch\.from_numpy",
        ),
        ({"settings": lambda: broken()}, rf"settings raised ValueError: no such size {HERE}"),
        ({"settings": lambda: {"x": {1, 2}}}, rf"settings returned what JSON cannot hold .* {HERE}\. Return a dict"),
    ],
)
def test_what_is_wrong_with_a_workload_is_said_with_method_place_and_remedy(methods, message):
    with pytest.raises(WorkloadError, match=message):
        estimate(Given(**methods), load_hardware("8x-a100-nvlink"))


class OnlyOnce(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure) if self.num_steps == 1 else broken()


def test_what_only_real_tensors_or_a_later_step_bring_to_light_is_said_in_the_same_way():
    def loss(model, batch):
        return Built.loss(Given(), model, batch) if isinstance(batch, FakeTensor) else broken()

    workload = Given(loss=loss)
    with pytest.raises(WorkloadError, match=rf"loss raised ValueError: no such size {HERE}"):
        measure_compute(workload, trace(workload).structure, (1,), "cpu", 1.0)
    for measure in (measure_optimizer, lambda workload: optimizer_cost(workload, load_hardware("8x-a100-nvlink"))):
        with pytest.raises(WorkloadError, match=rf"whose step\(\) raised ValueError: no such size {HERE}"):
            measure(Given(build_optimizer=lambda parameters: OnlyOnce(parameters, lr=0.1)))


def test_the_users_own_exception_is_the_cause():
    with pytest.raises(WorkloadError) as caught, user_code.calling("loss"):
        broken()
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_this_package_and_a_machine_that_fails_are_no_fault_of_the_workload():
    batch, model = torch.zeros(1), nn.Linear(1, 1)
    for error in (
        DataError("text", "it is empty", "Give another --data"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:75] can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("[../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"),
    ):
        with pytest.raises(type(error)) as caught:
            user_code.loss(Given(loss=lambda model, batch, error=error: broken(error)), model, batch)
        assert caught.value is error


def test_data_that_ends_is_told_with_its_rank_and_the_number_that_it_began_with():
    batches = user_code.batches(Given(build_batches=one_batch), 3, 4, 1, 0, 7)
    next(batches)
    with pytest.raises(WorkloadError, match=r"ended at micro-batch 8 of rank 3"):
        next(batches)


def test_held_out_batches_are_looked_at_and_may_end():
    assert user_code.eval_batches(Given(), 0, 1, 1) is None
    good = Given(build_eval_batches=lambda *_: [torch.zeros(1)])
    assert len(list(user_code.eval_batches(good, 0, 1, 1))) == 1
    with pytest.raises(WorkloadError, match="build_eval_batches yielded no tensors, but 'x'"):
        list(user_code.eval_batches(Given(build_eval_batches=lambda *_: ["x"]), 0, 1, 1))
    with pytest.raises(WorkloadError, match=r"build_eval_batches returned 3 .* Return batches, or None"):
        user_code.eval_batches(Given(build_eval_batches=lambda *_: 3), 0, 1, 1)


@pytest.mark.parametrize("blocks", ["layers", (0, 1), 7])
def test_blocks_are_paths(blocks):
    workload = type("Odd", (Built,), {"blocks": blocks})(plain_stack)
    with pytest.raises(WorkloadError, match=r"workload's blocks"):
        user_code.blocks(workload)


def test_a_precision_that_is_none_is_refused():
    workload = Given()
    workload.precision = "fp16"
    with pytest.raises(UsageError, match=r"precision is 'fp16'\. Set it to 'fp32' or 'bf16'"):
        user_code.rehearse(workload)


def test_a_worker_adds_its_rank_and_where_the_traceback_is(tmp_path, monkeypatch):
    import ray.train

    class Context:
        def get_world_rank(self):
            return 2

    def fails(rank, config):
        with user_code.calling("loss"):
            broken()

    monkeypatch.setattr(ray.train, "get_context", Context)
    monkeypatch.setattr(worker, "_run", fails)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OsdpError, match=rf"loss raised ValueError: no such size on rank 2 {HERE}.*failure-rank-2\.txt"):
        worker.train_worker({"import_paths": [], "directory": str(tmp_path), "run_dir": str(tmp_path)})
    assert "in broken" in (tmp_path / "failure-rank-2.txt").read_text()


def test_the_place_is_the_users_innermost_line_even_below_torch():
    class Calling(nn.Module):
        def forward(self, x):
            return nn.functional.linear(x, torch.zeros(3, 4))  # fails inside torch, called from here

    line = Calling.forward.__code__.co_firstlineno + 1
    with pytest.raises(WorkloadError, match=rf"{__file__}:{line}\)"):
        user_code.loss(Given(loss=lambda model, batch: model(batch)), Calling(), torch.zeros(2, 5))


def test_a_workload_that_holds_what_cannot_be_sent_to_workers_is_refused_before_any_is_started(world):
    with pytest.raises(WorkloadError, match=r"state cannot be sent to workers .*cannot pickle.* settings and paths"):
        profile(Given(lock=threading.Lock()), world.discover(num_workers=1))
