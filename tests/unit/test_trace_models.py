"""Tracing takes models as they come, and says of those that it cannot take what is wrong and where."""

import pytest
import torch
from torch import nn

from osdp_ray.errors import TraceError, WorkloadError
from osdp_ray.profiling.trace import trace
from osdp_ray.workloads.hf import hf
from tests.models import LENGTH, OWN, VALUES, WIDTH, Built, Layer, Stack


def sections_of(name):
    traced = trace(OWN[name]())
    return [(section.name, section.class_index) for section in traced.structure.sections], traced


def test_blocks_of_two_kinds_in_turn_are_told_apart():
    sections, traced = sections_of("alternating")
    kinds = [traced.structure.classes[index].parameters[2].shape[0] for _, index in sections[1:-1]]
    assert kinds == [96, 64] * 4


def test_a_block_that_differs_by_its_neighbours_has_a_class_of_its_own():
    sections, _ = sections_of("first-frozen")
    assert [name for name, _ in sections] == ["stem", *(f"layers.{i}" for i in range(5)), "head"]
    classes = [index for _, index in sections[1:-1]]
    assert classes[0] == classes[1]
    assert classes[2] not in classes[:2]


@pytest.mark.parametrize("name", ["shared-layers", "one-shared-layer", "no-blocks"])
def test_a_model_without_blocks_that_run_once_is_one_section(name):
    sections, traced = sections_of(name)
    assert [name for name, _ in sections] == ["stem", "head"]
    owned = sum(len(section_class.parameters) for section_class in traced.structure.classes)
    assert owned == len(list(OWN[name]().build_model().parameters()))


def test_a_deep_model_gives_the_traces_of_a_shallow_one():
    shallow, deep = (trace(Built(lambda n=n: Stack([Layer() for _ in range(n)]))) for n in (4, 12))
    assert shallow.traces == deep.traces
    assert len(deep.structure.sections) == len(shallow.structure.sections) + 8


@pytest.mark.parametrize(("model", "precision"), [("llama", "bf16"), ("gpt2", "fp32")])
def test_every_class_of_blocks_has_a_trace_of_every_way_to_recompute(model, precision):
    pytest.importorskip("transformers")
    workload = hf(model=model, layers=6, hidden=32, heads=2, vocabulary=60, sequence=16)
    workload.precision = precision
    traced = trace(workload)
    blocks = {section.class_index for section in traced.structure.sections if section.name not in ("stem", "head")}
    expected = {(index, recompute) for index in blocks for recompute in ("none", "selective", "full")}
    assert expected <= {(found.class_index, found.recompute) for found in traced.traces}


def test_numbers_that_come_from_the_batch_may_be_read():
    class Cut(Stack):
        def forward(self, tokens):
            if (tokens >= 0).all():
                return super().forward(tokens[:, : LENGTH // 2])
            return super().forward(tokens)

    half, whole = trace(Built(lambda: Cut([Layer()]))), trace(Built(lambda: Stack([Layer()])))
    assert sum(half.traces[0].forward[3::5]) + sum(half.traces[0].forward[4::5]) < sum(
        whole.traces[0].forward[3::5]
    ) + sum(whole.traces[0].forward[4::5])


def test_a_parameter_without_a_dimension_is_refused_before_anything_runs():
    class Scaled(Stack):
        def __init__(self):
            super().__init__([Layer()])
            self.scale = nn.Parameter(torch.tensor(1.0))

    with pytest.raises(TraceError, match=r"'scale' failed: it is a parameter without a dimension.* Make it \[1\] long"):
        trace(Built(Scaled))


def test_a_parameter_without_an_element_is_refused_before_anything_runs():
    class Empty(Stack):
        def __init__(self):
            super().__init__([Layer()])
            self.bias = nn.Parameter(torch.zeros(0, 4))

    with pytest.raises(TraceError, match=r"'bias' failed: it is a parameter of shape \(0, 4\).* Leave it out"):
        trace(Built(Empty))


class Reading(Layer):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


class Choosing(Layer):
    def forward(self, x):
        return x + self.up(x[x.sum(-1) > 0]).sum()


@torch.library.custom_op("osdp_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Custom(Layer):
    def forward(self, x):
        return double(x)


class Leaving(Layer):
    def forward(self, x):
        return x + torch.from_numpy(x.detach().numpy())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Reading, r"'layers.1' .* reads values .* Avoid \.item\(\)"),
        (Choosing, r"'layers.1' .* reads values .* shapes that depend on values"),
        (Custom, r"'layers.1' .* fake tensors cannot run it .* Register a fake kernel"),
        (Leaving, r"'layers.1' .* fake tensors cannot run it .* keep to operations of torch"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_the_module_and_the_remedy(layer, message):
    with pytest.raises(TraceError, match=message):
        trace(Built(lambda: Stack([Layer(), layer()])))


class Batches(Built):
    def __init__(self, batches):
        super().__init__(lambda: Stack([Layer()]))
        self.batches = batches

    def build_batches(self, rank, num_ranks, micro_batch, seed, start_step):
        return self.batches(micro_batch)


def tokens(*shape):
    return torch.randint(VALUES, shape)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (lambda n: iter([tokens(n, 4), tokens(n, 5)]), r"\(2, 4\)\], then \[\(2, 5\)\]. Pad or cut every sample"),
        (lambda n: iter([tokens(4, 4)] * 2), r"do not grow in proportion .* whose first dimension is the micro-batch"),
    ],
)
def test_batches_that_cannot_be_planned_for_are_refused(batches, message):
    with pytest.raises(TraceError, match=message):
        trace(Batches(batches))


class Misfit(Layer):
    def forward(self, x):
        return self.down(self.norm(x))


class Torn(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient.view(7)


class Tearing(Layer):
    def forward(self, x):
        return Torn.apply(super().forward(x))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Misfit, rf"loss raised RuntimeError: .*, in module 'layers.1.down' \({__file__}:\d+\).* shapes and types fit"),
        (Tearing, rf"loss raised in backward RuntimeError: .* \({__file__}:\d+\)"),
    ],
)
def test_a_mistake_in_a_model_is_not_blamed_on_fake_tensors_but_named_by_module_and_line(layer, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        trace(Built(lambda: Stack([Layer(), layer()])))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_branch_on_the_size_of_the_batch_is_refused():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu() if len(x) > 2 else super().forward(x)

    with pytest.raises(TraceError, match=r"other operations at micro-batch 2 than at 3\. Avoid branches"):
        trace(Built(lambda: Stack([Branching(WIDTH, WIDTH)])))
