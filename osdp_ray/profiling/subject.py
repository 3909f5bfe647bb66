"""A model made ready for recording, and one recorded run of it.

In goes a model whose tensors are replaced by fake ones (real ones where the workload is to be measured) and a batch;
out comes a Recorder with what was allocated and freed in one forward and backward, or in a forward alone.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from osdp_ray.blame import calling, summary
from osdp_ray.errors import TraceError, WorkloadError
from osdp_ray.modeling import user_code
from osdp_ray.modeling.recompute import recompute_block
from osdp_ray.modeling.structure import is_within
from osdp_ray.profiling import values
from osdp_ray.profiling.fakes import (
    fakes_of,
    real_branches,
    reals_of,
    replace_tensors,
    seen_random_state,
    stored_before_use,
)
from osdp_ray.profiling.memo import Memo
from osdp_ray.profiling.recorder import BACKWARD, Numbers, Recorder, attach_gradient_hook, attach_hooks
from osdp_ray.profiling.work import Counter
from osdp_ray.records.profile import Recompute
from osdp_ray.workload import Workload

_FAKE_ERRORS = (RuntimeError, NotImplementedError, TypeError)
_FAKE_WORDS = re.compile(r"\bfake|\bmeta\b|data pointer|tensor subclass")
_USER_REMEDY = "Mend it there, and check that shapes and types fit each other."


class Subject:
    """A model made ready for recording: within the context its tensors are fake, or real ones where the workload is to
    be measured; its stubs stay on meta."""

    def __init__(self, workload: Workload, model: nn.Module, blocks: tuple[str, ...], stubs: frozenset[str]) -> None:
        self.workload, self.model, self.blocks, self.stubs = workload, model, blocks, stubs
        self.mode = contextlib.nullcontext() if workload.measure else FakeTensorMode()
        self.memo = None if workload.measure else Memo()
        self.modules = [
            (name, module) for name, module in model.named_modules() if name not in stubs and not is_within(name, stubs)
        ]
        self.dtype = torch.bfloat16 if workload.precision == "bf16" else None
        make = reals_of(workload) if workload.measure else fakes_of(workload, self.modules, self.mode)
        self.originals = replace_tensors(self.modules, make, self.dtype)
        self.stored = stored_before_use(self.modules, self.originals, self.mode, self.dtype)
        self.parameters = {
            id(parameter): (f"{name}.{key}" if name else key, parameter)
            for name, module in reversed(self.modules)
            for key, parameter in module.named_parameters(recurse=False)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tensors, name, tensor in self.originals:
            tensors[name] = tensor

    def record(
        self,
        recomputes: Mapping[str, Recompute],
        batch: Any,
        watch: Counter | None = None,
        *,
        evaluates: bool = False,
    ) -> Recorder:
        """Records one forward and backward with blocks recomputed as given, by name; a forward alone to evaluate."""
        recorder = Recorder(watch, memo=self.memo)
        fake = tree_map(self._fake, batch)
        tensors = [
            tensor for _, module in self.modules for tensor in (*module._parameters.values(), *module._buffers.values())
        ]
        recorder.own([tensors, fake, [stored for *_, stored in self.stored]])
        for name, recompute in recomputes.items():
            recompute_block(self.model.get_submodule(name), recompute)
        handles = [*self._attach(recorder), *self._show_stored()]
        try:
            self.model.train(not evaluates)
            self._run(recorder, fake, evaluates)
        finally:
            recorder.recording = False
            for handle in handles:
                handle.remove()
            self._show_gathered()
            for _, parameter in self.parameters.values():
                parameter.grad = None
            for name in recomputes:
                del self.model.get_submodule(name).forward
        return recorder

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self.workload.measure:
            return leaf.clone()
        fake = self.mode.from_tensor(leaf)
        values.remember(fake, leaf)
        return fake

    def _attach(self, recorder: Recorder) -> list[Any]:
        handles, inside = [], frozenset(self.blocks)
        for name, module in self.modules:
            is_block = name in inside
            if name == "" or is_block or any(True for _ in module.parameters(recurse=False)):
                dtype = self.dtype if name == "" or is_block or not is_within(name, inside) else None
                handles += attach_hooks(recorder, name, module, is_block=is_block, dtype=dtype)
        for name in self.stubs:
            stub = self.model.get_submodule(name)
            handles.append(stub.register_forward_pre_hook(lambda *_, name=name: recorder.order.append(name)))
        for name, parameter in self.parameters.values():
            if parameter.requires_grad:
                handles.append(attach_gradient_hook(recorder, parameter, name))
        return handles

    def _show_stored(self) -> list[Any]:
        """Until the first module with parameters runs, and FSDP2 gathers, a model sees parameters as they are stored.

        Some look at the type of a weight then, and cast their inputs to it.
        """
        for tensors, key, _, stored in self.stored:
            tensors[key] = stored
        if not self.stored:
            return []
        owners = [m for name, m in self.modules if name and any(True for _ in m.parameters(recurse=False))]
        return [owner.register_forward_pre_hook(lambda *_: self._show_gathered(), prepend=True) for owner in owners]

    def _show_gathered(self) -> None:
        for tensors, key, gathered, _ in self.stored:
            tensors[key] = gathered

    def _run(self, recorder: Recorder, batch: Any, evaluates: bool) -> None:
        try:
            with self.mode, recorder, Numbers(recorder), seen_random_state(), real_branches():
                with torch.set_grad_enabled(not evaluates):
                    loss = user_code.loss(
                        self.workload, self.model, batch, needs_gradient=not evaluates, passes=_is_of_fakes
                    )
                if evaluates:
                    del loss
                    recorder.mark(BACKWARD, "")
                    return
                recorder.mark(BACKWARD, "")
                with calling("loss", doing="raised in backward", passes=_is_of_fakes):
                    _run_backward(loss / 1, recorder)  # the worker divides too, for accumulation
                del loss
        except WorkloadError as error:
            module = self._failing_module(error.__cause__)
            if not module:
                raise
            problem = f"{error.problem}, in module {module!r}"
            raise WorkloadError(error.method, problem, error.place, _USER_REMEDY) from error.__cause__
        except values.UNREADABLE as error:
            raise TraceError(
                self._failing_module(error),
                f"it reads values of activations or parameters, which have none before a run ({summary(error)})",
                "Avoid .item(), .tolist(), bool(tensor) and shapes that depend on values (of a mixture of experts take "
                "an implementation of fixed shapes, such as grouped_mm), or use --measure, which runs it",
            ) from error
        except _FAKE_ERRORS as error:
            raise TraceError(
                self._failing_module(error),
                f"fake tensors cannot run it ({summary(error)})",
                "Register a fake kernel for custom operations (torch.library.register_fake), keep to operations of "
                "torch, or use --measure, which runs it",
            ) from error

    def _failing_module(self, error: BaseException | None) -> str:
        """The innermost module in whose code the error was raised, '' where it was none."""
        names = {id(module): name for name, module in reversed(self.modules)}
        found = ""
        trail = error.__traceback__ if error is not None else None
        while trail is not None:
            found = names.get(id(trail.tb_frame.f_locals.get("self")), found)
            trail = trail.tb_next
        return found


def _is_of_fakes(error: BaseException) -> bool:
    """Whether fake tensors fail where real ones would not: they have no values, and not all operations know them."""
    if isinstance(error, values.UNREADABLE) or user_code.is_out_of_memory(error):
        return True
    return isinstance(error, _FAKE_ERRORS) and _FAKE_WORDS.search(str(error).lower()) is not None


def _run_backward(loss: torch.Tensor, recorder: Recorder) -> None:
    """`loss.backward()`, without leaving `Numbers`, which must see what is recomputed (torch 2.13's own call).

    What lives on when it returns does so while FSDP2 ends its own backward, whoever lets go of it then.
    """
    engine = torch.autograd.Variable._execution_engine
    seed = torch.ones_like(loss)
    engine.run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    recorder.recording = False
