"""What a save keeps beside plain tensors: schedulers, extra state, factored state, random state of every generator."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from osdp_ray.errors import SaveError
from osdp_ray.execution.random_state import random_state, seed_all, set_random_state
from osdp_ray.execution.save_tensors import collect
from osdp_ray.execution.save_values import like, plain
from osdp_ray.execution.saves import Save, load, save
from osdp_ray.modeling.splitting import split_operator

SCHEDULERS = {
    "step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4], gamma=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
}


def rates(optimizer, scheduler, num_steps):
    found = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_a_scheduler_of_torch_goes_on_exactly(name, tmp_path):
    def build():
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = build()
    rates(optimizer, scheduler, 3)
    where = save(tmp_path, Save(step=3), model, optimizer, scheduler)
    expected, betas = rates(optimizer, scheduler, 5), optimizer.param_groups[0]["betas"]
    model, optimizer, scheduler = build()
    load(where, model, optimizer, scheduler)
    assert rates(optimizer, scheduler, 5) == expected
    assert optimizer.param_groups[0]["betas"] == betas


def test_a_scheduler_that_the_save_has_no_state_of_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = save(tmp_path, Save(step=1), model, optimizer)
    with pytest.raises(SaveError, match=r"it has no state of a scheduler. Resume without one"):
        load(where, model, optimizer, SCHEDULERS["cosine"](optimizer))


def test_values_come_back_as_the_kinds_they_were():
    value = {"a": (1, [2.5, None]), "b": {3: True, 4: "x"}, "c": torch.tensor(7)}
    assert like(value, plain("it", value)) == {"a": (1, [2.5, None]), "b": {3: True, 4: "x"}, "c": 7}
    with pytest.raises(SaveError, match=r"it holds a object, which a save cannot keep.*Use numbers and tensors"):
        plain("it", {"deep": [object()]})


def test_every_generator_goes_on_where_it_was():
    def draw():
        drawn = [torch.rand(3).tolist(), [random.random(), random.gauss(0, 1)]]
        return [*drawn, np.random.standard_normal(3).tolist(), np.random.randint(0, 100, 3).tolist()]

    seed_all(11)
    draw()
    state = random_state(2)
    assert {name.rpartition(".")[2] for name in state} == {"2"}
    expected = draw()
    draw()
    set_random_state(state, fallback_seed=1)
    assert draw() == expected
    set_random_state({}, fallback_seed=5)
    first = draw()
    set_random_state({}, fallback_seed=5)
    assert draw() == first != expected


class Counting(nn.Module):
    """Plain extra state in one module, a tensor of it in another."""

    def __init__(self, is_tensor):
        super().__init__()
        self.is_tensor, self.count = is_tensor, 0
        self.weight = nn.Parameter(torch.zeros(1))

    def get_extra_state(self):
        return torch.tensor([self.count]) if self.is_tensor else {"count": self.count}

    def set_extra_state(self, state):
        self.count = int(state[0]) if self.is_tensor else state["count"]


def test_extra_state_of_modules_comes_back(tmp_path):
    model, other = (nn.Sequential(Counting(False), Counting(True)) for _ in range(2))
    model[0].count, model[1].count = 4, 5
    optimizer = torch.optim.SGD(model.parameters())
    where = save(tmp_path, Save(step=1), model, optimizer)
    load(where, other)
    assert (other[0].count, other[1].count) == (4, 5)


def test_state_of_another_shape_than_its_parameter_is_kept_and_refused_for_slices(tmp_path):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4))
        optimizer = torch.optim.Adafactor(model.parameters())
        return model, optimizer

    def train(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()

    model, optimizer = build()
    train(model, optimizer)
    where = save(tmp_path, Save(step=1), model, optimizer)
    other, its_optimizer = build()
    load(where, other, its_optimizer)
    train(model, optimizer)
    train(other, its_optimizer)
    assert torch.equal(model[0].weight, other[0].weight)

    split, _ = build()
    split_operator(split, "0", 2)
    its_optimizer = torch.optim.Adafactor(split.parameters())
    with pytest.raises(SaveError, match=r"'row_var' of '0.weight' has shape \(4, 1\), and a slice .*without splits"):
        load(where, split, its_optimizer)
    its_optimizer = torch.optim.Adafactor(split.parameters())
    train(split, its_optimizer)
    with pytest.raises(SaveError, match=r"'row_var' of '0.weight' has shape .*slices of it make no whole"):
        collect(split, its_optimizer)


def test_weights_alone_are_loaded_without_an_optimizer_and_leave_random_state_as_it_is(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    where = save(tmp_path, Save(step=1), model, torch.optim.AdamW(model.parameters()))
    seed_all(3)
    expected = torch.rand(2)
    seed_all(3)
    load(where, other)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(other.weight, model.weight)


def test_tensors_that_differ_are_an_error_or_left_as_they_are(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    where = save(tmp_path, Save(step=1), model, optimizer)
    other = nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 2))
    kept = other[2].weight.clone()
    with pytest.raises(SaveError, match=r"lacks model.2.bias, model.2.weight; it has model.1.bias.*strict=False"):
        load(where, other)
    load(where, other, strict=False)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[2].weight, kept)
    assert "it lacks model.2.bias, model.2.weight; it has model.1.bias, model.1.weight" in caplog.text
    with pytest.raises(SaveError, match=r"model.0.weight is \(2, 3\) in it, and \(5, 3\) here. Take the model"):
        load(where, nn.Sequential(nn.Linear(3, 5), nn.Linear(2, 2)), strict=False)
