"""Running an operator as slices: parameters of their own, gathered one after another, each under its own choice.

    Linear     y = x W' + b,  W [out, in]    slice i has W[:, i]: it adds x[:, i] W[:, i]'  to y
    Conv1D     y = x W + b,   W [in, out]    slice i has W[:, i]: it fills y[:, i]
    Embedding  y = W[x],      W [rows, dim]  slice i has W[:, i]: it fills y[:, i]

So slices always lie along the weight's second dimension, and sharding, along the first, stays as even as it was. A bias
is the first slice's. All slices write into one output, and in backward into one gradient of the input, so splitting
costs no activation: within the operator all that changes is that weights and their gradients come and go one by one.

Autograd sees a chain of in-place functions, the last slice's backward first. A slice's hooks need a tensor that asks
for a gradient among its arguments: that is `token`, which has no elements. What backward needs of the input is saved
once, by the first slice, before anything is computed: where an operator is recomputed, that is where torch stops.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from osdp_ray.errors import PlanMismatchError
from osdp_ray.modeling.recompute import keep_or_reuse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """Where a parameter of a split operator lies in the model's own: `name` and `shape` are those of the whole, the
    slice starts at `start` along `dim`. A bias is a slice that is the whole."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """Parameter's path -> where it lies, for the parameters of split operators; others are their own whole."""
    found: dict[str, Slice] = {}
    for name, module in model.named_modules():
        if isinstance(module, SplitOperator):
            found |= {f"{name}.slices.{path}": place for path, place in module.places(name).items()}
    return found


def is_splittable(module: nn.Module) -> bool:
    """Whether an operator has slices: a plain Linear, Embedding or Conv1D (of transformers), and none of a subclass."""
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        return False
    return f"{type(module).__module__}.{type(module).__name__}" in _KINDS and not module._parameters.keys() - {
        "weight",
        "bias",
    }


@contextlib.contextmanager
def watch_weights(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[set[str]]:
    """Within the context, gathers the paths of operators whose weight or bias anyone but their own forward reads.

    Slices have none to show.
    """
    read: set[str] = set()
    running: list[nn.Module] = []
    changed = []
    for path, module in modules:
        if is_splittable(module):
            changed.append((module, type(module)))
            module.__class__ = _watched(type(module), path, read, running)
    try:
        yield read
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _watched(kind: type, path: str, read: set[str], running: list[nn.Module]) -> type:
    def look_up(self: nn.Module, name: str) -> Any:
        if name in ("weight", "bias") and self not in running:
            read.add(path)
        return kind.__getattr__(self, name)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running.append(self)
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            running.remove(self)

    return type(kind.__name__, (kind,), {"__getattr__": look_up, "forward": forward, "__module__": kind.__module__})


def split_operator(model: nn.Module, path: str, num_slices: int) -> None:
    """Puts a SplitOperator in the place of a module of the model.

    Raises PlanMismatchError where the module has no slices or its weight does not divide into so many.
    """
    module = model.get_submodule(path)
    if not is_splittable(module):
        raise PlanMismatchError(f"slices of {path!r}", "a plain Linear, Embedding or Conv1D", type(module).__name__)
    if module.weight.shape[1] % num_slices:
        planned, found = f"{num_slices} slices", f"a second dimension of {module.weight.shape[1]}"
        raise PlanMismatchError(f"slices of {path!r}", planned, found)
    parent, _, name = path.rpartition(".")
    kind = _KINDS[f"{type(module).__module__}.{type(module).__name__}"]
    setattr(model.get_submodule(parent), name, kind(module, num_slices))


class SplitOperator(nn.Module):
    """A module run as `slices`. Hooks of the module that it replaces stay."""

    is_expensive: ClassVar = True  # kept by selective recomputation

    def __init__(self, module: nn.Module, num_slices: int) -> None:
        super().__init__()
        weight, bias = module.weight, getattr(module, "bias", None)
        self.whole_shapes = {"weight": tuple(weight.shape)} | ({} if bias is None else {"bias": tuple(bias.shape)})
        self.in_features, self.out_features = self._features(weight)
        size = weight.shape[1] // num_slices
        self.slices = nn.ModuleList(
            _Slice(self, weight, bias if index == 0 else None, index * size, size) for index in range(num_slices)
        )
        self.training = module.training
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(module, hooks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_expensive:
            return self._run(x)
        return keep_or_reuse(lambda: self._run(x), lambda dtype: self._saved_anew(x, dtype), _Given.apply)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        work, token = _Work(), self._token(x)
        for index, part in enumerate(self.slices):
            out = part(token, x, work) if index == 0 else part(token, None, work)
        work.x = work.out = None
        return out.view(*self._leading(x), self.out_features)

    def _saved_anew(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The token of a run whose output is there already: all that it does is to save backward's input, in the type
        that is computed with, to which FSDP2 casts what a slice is given."""
        token, x = self._token(x), self._flat(x).to(dtype)
        return _Save.apply(token, self.slices[0].saved(x)) if token.requires_grad else token

    def _token(self, x: torch.Tensor) -> torch.Tensor:
        trains = any(parameter.requires_grad for parameter in self.parameters())
        return torch.empty(0, device=x.device, requires_grad=torch.is_grad_enabled() and (x.requires_grad or trains))

    def places(self, name: str) -> dict[str, Slice]:
        """The parameters of `slices`, by path within it."""
        found = {}
        for index, part in enumerate(self.slices):
            shape = self.whole_shapes["weight"]
            found[f"{index}.weight"] = Slice(name=f"{name}.weight", shape=shape, dim=1, start=part.start)
            if part.bias is not None:
                found[f"{index}.bias"] = Slice(name=f"{name}.bias", shape=self.whole_shapes["bias"], dim=0, start=0)
        return found

    def extra_repr(self) -> str:
        return f"{self.whole_shapes['weight']} in {len(self.slices)} slices"

    # What tells the kinds apart; x and out are [tokens, features], and so are their gradients.

    @staticmethod
    def _features(weight: torch.Tensor) -> tuple[int, int]:
        """(in, out)"""
        raise NotImplementedError

    @staticmethod
    def _leading(x: torch.Tensor) -> torch.Size:
        return x.shape[:-1]

    @staticmethod
    def _flat(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, x.shape[-1])

    @staticmethod
    def num_rows(x: torch.Tensor) -> int:
        return x.shape[0]

    @staticmethod
    def add(part: "_Slice", x: torch.Tensor, out: torch.Tensor, *, is_first: bool) -> None:
        """Adds a slice's share to the output, which the first one also initialises."""
        raise NotImplementedError

    @staticmethod
    def add_grad_x(part: "_Slice", grad: torch.Tensor, grad_x: torch.Tensor, *, is_first: bool) -> None:
        """The same for the gradient of the input, in which the last slice comes first."""
        raise NotImplementedError

    @staticmethod
    def grad_weight(part: "_Slice", grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class SplitLinear(SplitOperator):
    """nn.Linear along its input features."""

    @staticmethod
    def _features(weight: torch.Tensor) -> tuple[int, int]:
        return weight.shape[1], weight.shape[0]

    @staticmethod
    def add(part: "_Slice", x: torch.Tensor, out: torch.Tensor, *, is_first: bool) -> None:
        x = x[:, part.columns]
        if not is_first:
            out.addmm_(x, part.weight.t())
        elif part.bias is None:
            torch.mm(x, part.weight.t(), out=out)
        else:
            torch.addmm(part.bias, x, part.weight.t(), out=out)

    @staticmethod
    def add_grad_x(part: "_Slice", grad: torch.Tensor, grad_x: torch.Tensor, *, is_first: bool) -> None:
        torch.mm(grad, part.weight, out=grad_x[:, part.columns])

    @staticmethod
    def grad_weight(part: "_Slice", grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad.t().mm(x[:, part.columns])


class SplitConv1D(SplitOperator):
    """transformers' Conv1D, a Linear with its weight transposed, along its output features."""

    @staticmethod
    def _features(weight: torch.Tensor) -> tuple[int, int]:
        return weight.shape[0], weight.shape[1]

    @staticmethod
    def add(part: "_Slice", x: torch.Tensor, out: torch.Tensor, *, is_first: bool) -> None:
        if is_first:
            out.copy_(part.bias)
        out[:, part.columns].addmm_(x, part.weight)

    @staticmethod
    def add_grad_x(part: "_Slice", grad: torch.Tensor, grad_x: torch.Tensor, *, is_first: bool) -> None:
        if is_first:
            torch.mm(grad[:, part.columns], part.weight.t(), out=grad_x)
        else:
            grad_x.addmm_(grad[:, part.columns], part.weight.t())

    @staticmethod
    def grad_weight(part: "_Slice", grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.t().mm(grad[:, part.columns])


class SplitEmbedding(SplitOperator):
    """nn.Embedding along its output features."""

    is_expensive: ClassVar = False

    def __init__(self, module: nn.Module, num_slices: int) -> None:
        super().__init__(module, num_slices)
        self.padding_idx = -1 if module.padding_idx is None else module.padding_idx

    @staticmethod
    def _features(weight: torch.Tensor) -> tuple[int, int]:
        return weight.shape[0], weight.shape[1]

    @staticmethod
    def _leading(x: torch.Tensor) -> torch.Size:
        return x.shape

    @staticmethod
    def _flat(x: torch.Tensor) -> torch.Tensor:
        return x  # a flat copy of indices that were expanded would be kept until backward

    @staticmethod
    def num_rows(x: torch.Tensor) -> int:
        return x.numel()

    @staticmethod
    def add(part: "_Slice", x: torch.Tensor, out: torch.Tensor, *, is_first: bool) -> None:
        torch.index_select(part.weight, 0, x.reshape(-1), out=out[:, part.columns])

    @staticmethod
    def add_grad_x(part: "_Slice", grad: torch.Tensor, grad_x: torch.Tensor, *, is_first: bool) -> None:
        raise NotImplementedError("indices have no gradient")

    @staticmethod
    def grad_weight(part: "_Slice", grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows, padding = part.weight.shape[0], part.of.padding_idx
        return torch.ops.aten.embedding_dense_backward(grad[:, part.columns], x, rows, padding, False)


class _Work:
    """What the slices share while one forward or one backward runs: not a tensor, so that no hook looks inside."""

    x: torch.Tensor | None = None
    out: torch.Tensor | None = None
    saved: Any = None  # the autograd node that keeps the input
    grad_x: torch.Tensor | None = None
    wants_grad_x = False


class _Slice(nn.Module):
    """One slice: its `weight` is columns `start` to `start + size` of the whole."""

    def __init__(self, of: SplitOperator, weight: nn.Parameter, bias: nn.Parameter | None, start: int, size: int):
        super().__init__()
        columns = weight.detach()[:, start : start + size]
        columns = torch.empty_like(columns) if columns.is_meta else columns.clone(memory_format=torch.contiguous_format)
        self.weight = nn.Parameter(columns, requires_grad=weight.requires_grad)
        self.bias = bias
        self.start, self.columns = start, slice(start, start + size)
        self.__dict__["of"] = of  # no submodule: its parent holds it

    def forward(self, token: torch.Tensor, x: torch.Tensor | None, work: _Work) -> torch.Tensor:
        is_first = work.out is None
        if x is not None:
            work.x, work.wants_grad_x = self.of._flat(x), x.requires_grad
            if token.requires_grad:
                token = _Save.apply(token, self.saved(work.x))
                work.saved = token.grad_fn
        work.out = _Add.apply(token, x, work.out, self.weight, self.bias, self, work, is_first)
        return work.out

    def saved(self, x: torch.Tensor) -> torch.Tensor:
        """What backward needs: the input for the weight's gradient. Where that is frozen torch keeps the weight, and
        something must be kept: recomputation stops at the last of it."""
        return x if self.weight.requires_grad else x.new_empty(0)


class _Save(torch.autograd.Function):
    """Keeps a tensor for the backward of others, as torch keeps what it saves: recomputation gives it anew."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Given(torch.autograd.Function):
    """A tensor that is there already, as the output of an operation on `token`."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


class _Add(torch.autograd.Function):
    """A slice's share of the output, in place."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        part: _Slice,
        work: _Work,
        is_first: bool,
    ) -> torch.Tensor:
        ctx.part, ctx.work = part, work
        ctx.x_shape = None if x is None else x.shape  # of the first slice, which alone is given it
        if out is None:
            out = weight.new_empty(part.of.num_rows(work.x), part.of.out_features)
        else:
            ctx.mark_dirty(out)
        part.of.add(part, work.x, out, is_first=is_first)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part, work = ctx.part, ctx.work
        grad_x = grad_weight = grad_bias = None
        if work.x is None:  # recomputation happens here, before anything is allocated, and gives it once
            (work.x,) = work.saved.saved_tensors
        if work.wants_grad_x:
            is_first = work.grad_x is None
            if is_first:
                work.grad_x = grad.new_empty(grad.shape[0], part.of.in_features)
            part.of.add_grad_x(part, grad, work.grad_x, is_first=is_first)
        if ctx.needs_input_grad[3]:
            grad_weight = part.of.grad_weight(part, grad, work.x)
        if ctx.needs_input_grad[4]:
            grad_bias = grad.sum(0)
        if ctx.x_shape is not None:
            grad_x = None if work.grad_x is None else work.grad_x.view(ctx.x_shape)
            work.x = work.grad_x = None
        return None, grad_x, None if ctx.x_shape is not None else grad, grad_weight, grad_bias, None, None, None


_KINDS: dict[str, type[SplitOperator]] = {
    "torch.nn.modules.linear.Linear": SplitLinear,
    "torch.nn.modules.sparse.Embedding": SplitEmbedding,
    "transformers.pytorch_utils.Conv1D": SplitConv1D,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
