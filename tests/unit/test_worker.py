"""The training loop of one rank, in this process: numbers that stop being finite, data that ends."""

import math

import pytest
import torch
import torch.distributed as dist

from osdp_ray.errors import DivergedError, WorkloadError
from osdp_ray.execution.exports import export
from osdp_ray.execution.finite import is_finite
from osdp_ray.execution.options import TrainOptions
from osdp_ray.execution.saves import list_saves, read_save
from osdp_ray.execution.worker import TrainLoop
from osdp_ray.workloads.gpt import GptWorkload
from tests.distributed.test_saves import GLOBAL_BATCH, LocalObserver, make_plan

BAD_STEP, NUM_STEPS = 4, 8


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("a line of text, and another\n" * 400)
    return str(path)


class Odd(GptWorkload):
    """Something happens in its micro-batch number `at`, counted from 1: a method `happens` replaces the loss."""

    num_losses, at = 0, (BAD_STEP - 1) * GLOBAL_BATCH + 1

    def loss(self, model, batch):
        self.num_losses += 1
        loss = super().loss(model, batch)
        return self.happens(model, loss) if self.num_losses == self.at else loss

    def settings(self):
        return {}


def train(data, out, happens, *, max_norm=1.0, save_every=1, options=None, **attributes):
    work = Odd(layers=2, hidden=16, heads=2, sequence=16, data=data, held_out_windows=0)
    work.happens = happens
    vars(work).update(attributes)
    observer = LocalObserver()
    loop = TrainLoop(
        workload=work,
        plan=make_plan(work, ("ZeRO-3",) * 4, num_ranks=1, micro_batch=1),
        options=TrainOptions(
            **({"num_steps": NUM_STEPS, "save_every": save_every, "max_norm": max_norm} | (options or {}))
        ),
        run_dir=str(out),
        plan_index=0,
        device=torch.device("cpu"),
        observer=observer,
    )
    return loop, observer


def not_a_number(model, loss):
    return loss * math.nan


def infinite(model, loss):
    return loss + math.inf


@pytest.mark.parametrize(
    ("happens", "max_norm", "problem"),
    [
        (not_a_number, 1.0, "the loss is nan in step 4"),
        (infinite, None, "the loss is inf in step 4"),
        (lambda model, loss: loss * 1e37, 1.0, "the norm of the gradients is inf in step 4"),
    ],
)
def test_what_is_not_finite_ends_the_run_at_that_step_and_is_never_saved(data, tmp_path, happens, max_norm, problem):
    loop, observer = train(data, tmp_path, happens, max_norm=max_norm)
    with pytest.raises(DivergedError, match=rf"{problem}\..*step-00000003 is whole and --resume goes on from it"):
        loop.run(None)
    assert [path.name for path in list_saves(tmp_path)] == ["step-00000002", "step-00000003"]
    assert observer.samples[-1].step == BAD_STEP


def test_an_update_that_spoils_the_state_is_seen_before_it_is_saved(data, tmp_path):
    loop, _ = train(data, tmp_path, lambda model, loss: loss, save_every=2)
    update = loop._update

    def spoiling():
        norm = update()
        if loop.step + 1 == BAD_STEP:
            loop.optimizer.state[loop.parameters[-1]]["exp_avg_sq"].to_local().view(-1)[-1] = math.inf
        return norm

    loop._update = spoiling
    with pytest.raises(DivergedError, match=r"state are not finite any more after the update in step 4"):
        loop.run(None)
    assert [path.name for path in list_saves(tmp_path)] == ["step-00000002"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(value):
    parameters = [torch.nn.Parameter(torch.full((5,), 3e38)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters)
    assert is_finite(parameters, optimizer, torch.device("cpu"))
    with torch.no_grad():
        parameters[1][2] = value
    assert not is_finite(parameters, optimizer, torch.device("cpu"))


def test_a_save_holds_the_samples_that_the_driver_may_lack(data, tmp_path):
    loop, observer = train(data, tmp_path, lambda model, loss: loss)
    loop.run(None)
    assert read_save(list_saves(tmp_path)[-1]).samples == (observer.samples[-1],)


def test_a_run_starts_from_the_model_of_another_and_saves_elsewhere(data, tmp_path):
    first, _ = train(data, tmp_path / "a", lambda model, loss: loss, save_every=0)
    first.run(None)
    export(tmp_path / "a", tmp_path / "exported")
    for source in (tmp_path / "a", tmp_path / "exported"):
        options = {"init_from": str(source), "saves_to": str(tmp_path / f"saves-{source.name}"), "num_steps": 0}
        second, _ = train(data, tmp_path / "b", lambda model, loss: loss, save_every=0, options=options)
        second.run(None)
        for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())
    options = {"saves_to": str(tmp_path / "elsewhere"), "async_saves": True, "saves_kept": 3}
    third, _ = train(data, tmp_path / "c", lambda model, loss: loss, options=options)
    assert third.run(None)["save"] == str(tmp_path / "elsewhere" / "saves" / f"step-{NUM_STEPS:08d}")
    assert len(list_saves(tmp_path / "elsewhere")) == 3
    assert not (tmp_path / "c").exists()


def test_data_that_ends_in_training_is_told_with_its_micro_batch(data, tmp_path):
    loop, _ = train(data, tmp_path, lambda model, loss: loss)
    endless = loop.workload.build_batches(0, 1, 1, 0, 0)
    loop.workload.build_batches = lambda *_: (next(endless) for _ in range(GLOBAL_BATCH + 3))
    with pytest.raises(WorkloadError, match=rf"build_batches ended at micro-batch {GLOBAL_BATCH + 3} of rank 0"):
        loop.run(None)
