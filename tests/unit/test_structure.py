"""A model's blocks, operators and classes are found whatever the model calls them."""

import pytest
import torch
from torch import nn

from osdp_ray.errors import TraceError
from osdp_ray.modeling.structure import build_structure, find_blocks, signature
from osdp_ray.modeling.stubs import block_rows, stand_ins, stubbed


class Layer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + self.scale * self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, inners=(8, 8, 16, 8), *, tied=False):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Layer(4, inner) for inner in inners)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 10, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.body.layers:
            x = layer(x)
        return self.out(self.norm(x))


def structure_of(model):
    return build_structure(model, find_blocks(model, None), [name for name, _ in model.named_modules()])


def test_a_list_of_alike_layers_is_found_and_what_is_inside_a_block_is_not_searched():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)))

    assert find_blocks(Model(), None) == tuple(f"body.layers.{i}" for i in range(4))
    assert find_blocks(Nested(), None) == ("parts.0", "parts.1", "parts.2")
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None) == ("0", "1")


def test_layers_that_are_all_different_or_own_nothing_are_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.ReLU(), nn.ReLU()), None) == ()
    assert find_blocks(nn.Linear(2, 2), None) == ()


def test_named_lists_are_taken_as_they_are_and_a_wrong_name_is_refused():
    assert find_blocks(Model((8, 16)), ["body.layers"]) == ("body.layers.0", "body.layers.1")
    with pytest.raises(TraceError, match=r"'body.layer' .* Name the paths of lists of layers, such as 'transformer.h'"):
        find_blocks(Model(), ["body.layer"])


def test_blocks_of_equal_structure_share_a_class_and_others_do_not():
    structure = structure_of(Model())
    assert [section.name for section in structure.sections] == ["stem", *find_blocks(Model(), None), "head"]
    assert [section.class_index for section in structure.sections] == [0, 1, 1, 2, 1, 3]
    assert structure.members(1) == ("body.layers.0", "body.layers.1", "body.layers.3")
    assert [c.is_block for c in structure.classes] == [False, True, True, False]


def test_operators_are_the_modules_that_own_parameters_the_blocks_own_ones_too():
    structure = structure_of(Model())
    block = structure.classes[1]
    assert [operator.name for operator in block.operators] == ["", "up", "down"]
    assert [parameter.name for parameter in block.parameters] == [
        "scale",
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    assert block.parameter_bytes == 4 * sum(p.numel() for p in Layer(4, 8).parameters())
    assert [operator.name for operator in structure.classes[0].operators] == ["table"]
    assert [operator.name for operator in structure.classes[-1].operators] == ["norm", "out"]


def test_every_parameter_belongs_to_one_operator_of_one_section():
    model = Model()
    structure = structure_of(model)
    found = []
    for section in structure.sections:
        section_class = structure.classes[section.class_index]
        prefix = f"{section.name}." if section_class.is_block else ""
        for operator in section_class.operators:
            found += [f"{prefix}{section_class.parameters[index].name}" for index in operator.parameters]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


def test_modules_that_share_a_parameter_are_one_operator_where_the_first_of_them_runs():
    structure = structure_of(Model(tied=True))
    (tied,) = structure.classes[0].operators
    assert (tied.name, tied.modules) == ("table", ("table", "out"))
    assert len(tied.parameters) == 1
    assert [operator.name for operator in structure.classes[-1].operators] == ["norm"]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.up.weight.requires_grad_(False),
        lambda layer: layer.up.half(),
        lambda layer: layer.register_buffer("mask", torch.zeros(2)),
        lambda layer: setattr(layer, "down", nn.Linear(8, 4, bias=False)),
        lambda layer: setattr(layer, "extra", nn.Dropout(0.5)),
    ],
)
def test_what_is_frozen_of_another_dtype_or_holds_a_buffer_is_another_class(change):
    one, other = Layer(4, 8), Layer(4, 8)
    assert signature(one) == signature(other)
    change(other)
    assert signature(one) != signature(other)


def test_a_stub_passes_its_input_through_and_is_gone_afterwards():
    model = Model((8, 8, 8, 8, 8, 16))
    blocks = find_blocks(model, None)
    x = torch.randn(2, 4)
    expected = model.body.layers[3](x)

    real = stand_ins(block_rows(model, blocks))
    with stubbed(model, blocks, real) as stubs:
        assert stubs == {"body.layers.2", "body.layers.3"}
        assert "body.layers.5" in real
        for layer in model.body.layers[:2]:
            layer(x)
        assert model.body.layers[3](x) is x

    assert torch.equal(model.body.layers[3](x), expected)
    assert "forward" not in model.body.layers[3].__dict__
    assert not model.body.layers[0]._forward_hooks
