"""Operators as slices: the same numbers as the whole, no memory beside weights, and names of the parameters' places."""

import copy

import pytest
import torch
from torch import nn

from osdp_ray.errors import PlanMismatchError
from osdp_ray.modeling.recompute import recompute_block
from osdp_ray.modeling.splitting import is_splittable, slices_of, split_operator, watch_weights

transformers = pytest.importorskip("transformers.pytorch_utils")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.mix = transformers.Conv1D(48, 64)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.mix(nn.functional.gelu(self.up(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32, padding_idx=3)
        self.block = Block()
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


SPLITS = {"embedding": 4, "block.up": 2, "block.mix": 4, "block.down": 8, "head": 2}


def whole_and_split(recompute="none", frozen=()):
    torch.manual_seed(0)
    whole = Model()
    for name in frozen:
        whole.get_parameter(name).requires_grad_(False)
    split = copy.deepcopy(whole)
    if recompute != "none":
        recompute_block(whole.block, recompute)
        recompute_block(split.block, recompute)
    for path, num_slices in SPLITS.items():
        split_operator(split, path, num_slices)
    return whole, split


@pytest.mark.parametrize("frozen", [(), ("block.up.weight", "head.weight"), ("embedding.weight",)], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_give_the_output_and_the_gradients_of_the_whole(recompute, frozen):
    whole, split = whole_and_split(recompute, frozen)
    tokens = torch.randint(0, 50, (3, 7))

    outputs = whole(tokens), split(tokens)
    for output in outputs:
        output.square().mean().backward()

    assert torch.allclose(*outputs, atol=1e-6)
    wanted, places = dict(whole.named_parameters()), slices_of(split)
    for name, parameter in split.named_parameters():
        place = places[name]
        assert place.shape == wanted[place.name].shape
        gradient = wanted[place.name].grad
        if gradient is None:
            assert parameter.grad is None
            continue
        part = gradient.narrow(place.dim, place.start, parameter.shape[place.dim])
        assert torch.allclose(parameter.grad, part, atol=1e-8), name


def test_without_gradients_slices_compute_the_same():
    whole, split = whole_and_split()
    tokens = torch.randint(0, 50, (3, 7))
    with torch.no_grad():
        assert torch.allclose(split(tokens), whole(tokens), atol=1e-6)
        assert not split(tokens).requires_grad


def test_every_parameter_of_a_split_operator_has_its_place_in_the_whole():
    whole, split = whole_and_split()
    values, covered = dict(whole.named_parameters()), dict.fromkeys(dict(whole.named_parameters()), 0)
    for name, place in slices_of(split).items():
        parameter = split.get_parameter(name)
        assert torch.equal(parameter, values[place.name].narrow(place.dim, place.start, parameter.shape[place.dim]))
        covered[place.name] += parameter.numel()
    assert covered == {name: value.numel() for name, value in values.items()}
    assert [name for name in slices_of(split) if name.startswith("block.up.")] == [
        "block.up.slices.0.weight",
        "block.up.slices.0.bias",
        "block.up.slices.1.weight",
    ]


def test_hooks_of_a_module_that_is_split_still_run():
    model, seen = Model(), []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    split_operator(model, "head", 2)
    model(torch.zeros(2, 3, dtype=torch.long))
    assert seen == [(2, 3, 50)]


def test_only_plain_operators_are_split():
    class Own(nn.Linear):
        pass

    assert not is_splittable(Own(4, 4))
    assert not is_splittable(nn.LayerNorm(4))
    assert not is_splittable(nn.Embedding(4, 4, max_norm=1.0))
    assert not is_splittable(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(PlanMismatchError, match=r"slices of 'block' a plain Linear, .* here it is Block\. Plan again"):
        split_operator(Model(), "block", 2)
    with pytest.raises(PlanMismatchError, match=r"slices of 'head' 5 slices, .* a second dimension of 32\. Plan again"):
        split_operator(Model(), "head", 5)


def test_a_weight_that_another_module_reads_is_noticed():
    class Reads(Model):
        def forward(self, tokens):
            return super().forward(tokens) + self.block.up.weight.sum()

    model = Reads()
    with watch_weights(model.named_modules()) as read:
        model(torch.zeros(2, 3, dtype=torch.long))
    assert read == {"block.up"}
    assert type(model.head) is nn.Linear


def test_the_output_may_be_changed_in_place_by_what_comes_after():
    whole, split = whole_and_split()
    x = torch.randn(3, 32)
    gradients = []
    for model in (whole, split):
        leaf = x.clone().requires_grad_()
        model.block.up(leaf).mul_(2.0).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*gradients, rtol=1e-5)
