"""What is remembered of operations on fake tensors is what the fake mode itself would say."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from osdp_ray.profiling import recorder
from osdp_ray.profiling.memo import Memo, key_of, make, run_on_meta
from osdp_ray.profiling.trace import trace
from tests.memory_cases import MODELS

aten = torch.ops.aten


@pytest.fixture
def mode():
    with FakeTensorMode() as mode:
        yield mode


def facts(tensor):
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
    )


def shares(one, other):
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


SHARING = ("a view", "a view of a view", "several views", "an argument")
CASES = {
    "a new tensor": (aten.mm.default, lambda: (torch.empty(3, 4), torch.empty(4, 5))),
    "a view": (aten.transpose.int, lambda: (torch.empty(3, 4), 0, 1)),
    "a view of a view": (aten.view.default, lambda: (torch.empty(6, 4)[2:], [2, 8])),
    "several views": (aten.split.Tensor, lambda: (torch.empty(3, 4), 2, 1)),
    "an argument": (aten.add_.Tensor, lambda: (torch.empty(3, 4), torch.empty(4))),
    "several new tensors": (aten.native_layer_norm.default, lambda: (torch.empty(3, 4), [4], None, None, 1e-5)),
    "elementwise": (aten.mul.Tensor, lambda: (torch.empty(3, 4, dtype=torch.bfloat16), 2.0)),
    "elementwise, another order": (aten.add.Tensor, lambda: (torch.empty(3, 4).t(), torch.empty(4, 3))),
    "two types": (aten.add.Tensor, lambda: (torch.empty(3, dtype=torch.bfloat16), torch.empty(3))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_result_made_again_is_like_the_first(mode, name):
    function, arguments = CASES[name]
    memo, args = Memo(), arguments()
    result = function(*args)
    memo.keep(key_of(function, args, {}), function, args, {}, result, 0)

    again = arguments()
    remembered = memo.find(key_of(function, again, {}))
    made = make(remembered, again, {})

    assert type(made) is type(result)
    pairs = list(zip(made, result, strict=True)) if isinstance(result, list | tuple) else [(made, result)]
    for one, other in pairs:
        assert facts(one) == facts(other)
    is_shared = [any(shares(one, tensor) for tensor in again if isinstance(tensor, torch.Tensor)) for one, _ in pairs]
    assert is_shared == [name in SHARING] * len(pairs)


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_meta_device_say_the_same_or_are_not_asked(mode, name):
    function, arguments = CASES[name]
    args = arguments()
    made = run_on_meta(function, args, {})
    if made is NotImplemented:
        assert name in ("an argument", "several new tensors", "elementwise, another order", "two types")
        return
    result = function(*args)
    pairs = list(zip(made, result, strict=True)) if isinstance(result, list | tuple) else [(made, result)]
    assert all(facts(one) == facts(other) for one, other in pairs)


def test_what_a_key_cannot_describe_has_none(mode):
    with torch._C._DisableTorchDispatch():
        real = torch.ones(2)
    assert key_of(aten.neg.default, (real,), {}) is None
    assert key_of(aten.neg.default, (torch.empty(2, dtype=torch.complex64),), {}) is None
    assert key_of(aten.add.Tensor, (torch.empty(2), 1), {}) != key_of(aten.add.Tensor, (torch.empty(2), 1.0), {})
    x, y = torch.empty(2), torch.empty(2)
    assert key_of(aten.add.Tensor, (x, x), {}) != key_of(aten.add.Tensor, (x, y), {})


def test_an_operation_that_gives_its_argument_another_shape_is_not_remembered(mode):
    x, memo = torch.empty(3, 4), Memo()
    key = key_of(aten.transpose_.default, (x, 0, 1), {})
    memo.keep(key, aten.transpose_.default, (x, 0, 1), {}, aten.transpose_.default(x, 0, 1), 0)
    assert memo.find(key) is None


@pytest.mark.parametrize("name", ["gpt-dropout", "conv-net", "two-streams"])
def test_a_trace_is_the_same_without_anything_remembered(name, monkeypatch):
    workload = MODELS[name]()
    workload.precision = "bf16" if name == "gpt-dropout" else "fp32"
    made = trace(workload, counts_work=True)
    monkeypatch.setattr(recorder, "key_of", lambda *_: None)
    assert trace(workload, counts_work=True) == made
