"""Models under random arrangements, by plans and by hand: operators split or whole, each unit on a mesh of its own; and
known values for every tensor of model and optimizer, so that what a save holds is compared with what it never saw."""

import functools
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from osdp_ray.costs import divides
from osdp_ray.modeling.splitting import is_splittable, slices_of, split_operator
from osdp_ray.modeling.structure import build_structure
from osdp_ray.planning.choices import CHOICES, CHOICES_OF_NODES, group_units
from osdp_ray.records.plan import Plan, Prediction, SectionPlan, SolverReport, slice_name
from osdp_ray.workloads.gpt import GPT

STEP = 7.0


class Odd(nn.Module):
    """Fewer rows than ranks, uneven rows, buffers, a frozen layer, a parameter of its own, two names for one weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.first = nn.Linear(8, 3)
        self.second = nn.Linear(3, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 8).requires_grad_(False)
        self.tied = nn.Linear(8, 5, bias=False)
        self.tied.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(1, 9))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, x):
        x = self.norm(self.second(self.first(self.table(x))))
        return self.tied(F.relu(self.frozen(x))) * self.scale.sum()


MODELS = {
    "odd": Odd,
    "gpt": lambda: GPT(layers=1, hidden=16, heads=2, sequence=8, vocabulary=21),
    "gpt-tied": lambda: GPT(layers=1, hidden=16, heads=2, sequence=8, vocabulary=21, tied=True),
    "gpt-bf16": lambda: GPT(layers=1, hidden=16, heads=2, sequence=8, vocabulary=21).bfloat16(),
    "gpt-large": lambda: GPT(layers=1, hidden=64, heads=2, sequence=8, vocabulary=300),
}
OPTIMIZERS = {  # with the tensors that each keeps of a parameter, a step count aside
    "adamw-fused": (lambda parameters: torch.optim.AdamW(parameters, fused=True), ("exp_avg", "exp_avg_sq")),
    "adamw-amsgrad": (
        lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ),
    "sgd-momentum": (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), ("momentum_buffer",)),
}


@functools.cache
def mesh(kind):
    """The same mesh for every case of a process: each makes process groups."""
    num_ranks = dist.get_world_size()
    if kind == "world":
        return init_device_mesh("cpu", (num_ranks,))
    shape = (num_ranks, 1) if kind == "none" else (2, num_ranks // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def arrange(model, rng):
    """Splits operators and shards units at random, in place; alone a model is only split."""
    uses = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    tied = {name.rpartition(".")[0] for names in uses.values() if len(names) > 1 for name in names}
    for path, module in list(model.named_modules()):
        count = rng.choice((1, 2, 4))
        if path not in tied and count > 1 and is_splittable(module) and not module.weight.shape[1] % count:
            split_operator(model, path, count)
    if not dist.is_initialized():
        return model
    kinds = ["none", "world"] + (["node"] if dist.get_world_size() > 2 else [])
    palette = rng.sample(kinds, rng.randint(1, len(kinds)))
    for path, module in model.named_modules():
        if path and path not in tied and any(True for _ in module.parameters(recurse=False)) and rng.random() < 0.8:
            fully_shard(module, mesh=mesh(rng.choice(palette)), reshard_after_forward=rng.random() < 0.5)
    fully_shard(model, mesh=mesh(rng.choice(palette)))
    return model


def random_plan(model, rng, ranks_per_node):
    """A plan for a GPT with a choice per operator and per slice; most operators that can be are split."""
    blocks = tuple(f"blocks.{index}" for index in range(len(model.blocks)))
    structure = build_structure(model, blocks, [name for name, _ in model.named_modules()])
    palette = CHOICES if len(ranks_per_node) == 1 else CHOICES_OF_NODES
    sections = []
    for section in structure.sections:
        section_class = structure.classes[section.class_index]
        choices = {}
        for index, operator in enumerate(section_class.operators):
            count = rng.choice((1, 2, 4))
            is_split = operator.can_split and len(operator.modules) == 1 and divides(section_class, index, count)
            names = [slice_name(operator.name, part, count) for part in range(count)]
            for name in names if count > 1 and is_split else [operator.name]:
                choices[name] = rng.choice(palette)
        units = group_units(section_class, choices)
        sections.append(SectionPlan(name=section.name, is_block=section_class.is_block, recompute="none", units=units))
    nothing = Prediction(
        peak_bytes=1, persistent_bytes=1, peak_by_phase={}, step_s=1.0, step_s_by_phase={}, samples_per_s=1.0
    )
    return Plan(
        workload="gpt",
        workload_hash="0" * 16,
        ranks_per_node=ranks_per_node,
        precision="fp32",
        synchronise="every",
        budget_bytes=1,
        global_batch=sum(ranks_per_node),
        micro_batch=1,
        accumulation=1,
        sections=tuple(sections),
        prediction=nothing,
        alternatives=(),
        solver=SolverReport(solver="hand", status="feasible", gap_fraction=0.0, num_solves=0, num_cuts=0),
    )


def optimizer_of(model, kind, *, has_state):
    """An optimizer, with state as its first step makes it (which takes DTensors a second to learn) or none yet."""
    build, keys = OPTIMIZERS[kind]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build(trained)
    for parameter in trained if has_state else ():
        state = {key: torch.zeros_like(parameter, requires_grad=False) for key in keys}
        optimizer.state[parameter] = ({"step": torch.tensor(0.0)} if kind != "sgd-momentum" else {}) | state
    return optimizer


def tensors_of(model, optimizer):
    """(name in the save, tensor, place in its whole or None) of all tensors that this rank has."""
    slices, seen = slices_of(model), set()
    for fqn, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            place = slices.get(fqn)
            yield f"model.{place.name if place else fqn}", tensor.detach(), place
    for fqn, parameter in model.named_parameters():
        place = slices.get(fqn)
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"optimizer.{key}.{place.name if place else fqn}"
            yield name, value.detach(), place if value.shape == parameter.shape else None


def known(name, tensor, place):
    """The values that a tensor is to have on this rank: of its whole, its name's own."""
    shape = place.shape if place else tuple(tensor.shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = (torch.rand(shape, generator=generator) * 100).to(tensor.dtype)
    if name.startswith("optimizer.step."):
        whole.fill_(STEP)
    if place:
        whole = whole.narrow(place.dim, place.start, tensor.shape[place.dim]).contiguous()
    if isinstance(tensor, DTensor):
        return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    return whole


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill_with_known(model, optimizer):
    with torch.no_grad():
        for name, tensor, place in tensors_of(model, optimizer):
            local(tensor).copy_(known(name, tensor, place))


def differences(model, optimizer):
    """Names of the tensors that are not what they are to be, bit for bit, and how many there are in all."""
    found, num_tensors = [], 0
    for name, tensor, place in tensors_of(model, optimizer):
        num_tensors += 1
        if not torch.equal(local(tensor), known(name, tensor, place)):
            found.append(name)
    return found, num_tensors
