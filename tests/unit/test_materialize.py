"""Models built on meta are filled with the values that they initialise themselves with, by seed and name alone."""

import pytest
import torch
from torch import nn

from osdp_ray.errors import TraceError
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.workload import Workload
from osdp_ray.workloads.gpt import GptWorkload


class Built(Workload):
    """A workload that is its model alone."""

    def __init__(self, build):
        self.build = build

    def build_model(self):
        return self.build()


def materialized(workload, seed, **kwargs):
    model, initialisation = build_on_meta(workload)
    assert all(parameter.is_meta for parameter in model.parameters())
    initialisation.materialize(model, "cpu", seed, **kwargs)
    return model


def gpt(layers=2, **kwargs):
    return GptWorkload(layers=layers, hidden=32, heads=2, sequence=16, **kwargs)


def test_values_depend_on_the_constructor_and_the_seed_alone():
    first, again, other = (dict(materialized(gpt(), seed).named_parameters()) for seed in (1, 1, 2))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if "weight" in name and "norm" not in name:
            assert not torch.equal(value, other[name])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])


def test_values_have_the_distribution_of_the_models_own_initialisation():
    model = materialized(gpt(), 0)
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4**0.5, rel=0.1)
    assert torch.equal(model.blocks[1].mlp.up.bias, torch.zeros(128))
    assert torch.equal(model.norm.weight, torch.ones(32))


def test_drawing_them_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    materialized(gpt(), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_parameters_stay_tied():
    model = materialized(gpt(tied=True), 0)
    assert model.head.weight is model.token_embedding.weight
    assert not model.head.weight.is_meta


def test_modules_to_skip_stay_on_meta():
    model = materialized(gpt(layers=3), 0, skip=frozenset({"blocks.1"}))
    meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert meta == {f"blocks.1.{name}" for name, _ in model.blocks[1].named_parameters()}


def test_views_padding_rows_and_buffers_are_filled_as_the_constructor_says():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 6))
            nn.init.ones_(self.weight)
            with torch.no_grad():
                self.weight[1].zero_()
                self.weight[:, 2:4].fill_(5)
            self.table = nn.Embedding(3, 2, padding_idx=0)
            self.register_buffer("running", torch.zeros(3))
            self.register_buffer("fixed", torch.arange(4, device="cpu"))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    model = materialized(Built(Model), 0)
    expected = torch.ones(4, 6)
    expected[1] = 0
    expected[:, 2:4] = 5
    assert torch.equal(model.weight, expected)
    assert torch.equal(model.table.weight[0], torch.zeros(2))
    assert model.table.weight[1].abs().sum() > 0
    assert torch.equal(model.running, torch.zeros(3))
    assert torch.equal(model.fixed, torch.arange(4))
    assert torch.equal(model.frozen, torch.ones(2))
    assert not model.frozen.requires_grad


def test_a_parameter_that_is_never_initialised_is_refused_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.weight = nn.Parameter(torch.empty(2))

    with pytest.raises(TraceError, match=r"'inner.weight' .* Initialise it there, with torch.nn.init"):
        build_on_meta(Built(Model))


def test_a_tensor_copied_from_another_is_equal_to_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
            with torch.no_grad():
                self.other.weight.copy_(2 * self.one.weight)

    model = materialized(Built(Model), 0)
    assert torch.equal(model.other.weight, 2 * model.one.weight)
    assert not torch.equal(model.other.bias, model.one.bias)
