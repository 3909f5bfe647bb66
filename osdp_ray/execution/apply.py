"""Plan -> FSDP2: every unit of the plan becomes one `fully_shard` call, every recomputed block a checkpoint.

Order, per block: the units that are gathered at their own operators, then recomputation (it replaces `forward`, so that
the block's own FSDP hooks stay outside of it), then the unit gathered at the block's door. Last the root, which owns
no parameters of its own unless the model does.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from osdp_ray.errors import PlanMismatchError, ShardingError
from osdp_ray.execution.in_place import allow_in_place
from osdp_ray.execution.step_options import apply_step_options
from osdp_ray.modeling.recompute import recompute_block
from osdp_ray.modeling.replicas import replicate_in_place
from osdp_ray.modeling.ring import scatter_in_rings
from osdp_ray.modeling.splitting import split_operator
from osdp_ray.records.plan import Plan, ShardOver, Unit
from osdp_ray.records.profile import Precision


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    device_type: Literal["cpu", "cuda"] | None = None,
    compiles: bool = False,
) -> nn.Module:
    """Applies a plan to a model in place and returns it. With `compiles` every block's forward goes through
    torch.compile; see docs/executor.md for what that keeps.

    The model may be on the meta device; the process group must be up with as many ranks as the plan has, and without
    a `device_type` its backend tells it. Raises PlanMismatchError where the plan was made for another number of ranks,
    other modules or other shapes.
    """
    if dist.get_world_size() != plan.num_ranks:
        raise PlanMismatchError("ranks", str(plan.num_ranks), str(dist.get_world_size()))
    _check_shapes(model, plan)
    _split(model, plan)
    _check_operators(model, plan)
    meshes = _meshes(plan, device_type or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    policy = _POLICIES[plan.precision]
    root_unit: Unit | None = None
    outside: list[Unit] = []  # operators outside blocks: stem and head may lie inside each other's modules
    for section in plan.sections:
        if not section.is_block:
            outside += section.units
            continue
        block = model.get_submodule(section.name)
        for unit in _innermost_first(section.units[1:]):
            _shard_operators(block, unit, meshes, policy)
        if compiles:  # within recomputation and the units' hooks
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        if section.recompute != "none":
            recompute_block(block, section.recompute)
        if section.units:
            _shard(block, section.units[0], meshes, policy)
    for unit in _innermost_first(outside):
        if unit.operators == ("",):  # the model's own direct parameters
            root_unit = unit
        else:
            _shard_operators(model, unit, meshes, policy)
    if root_unit is None:
        fully_shard(model, mesh=meshes["world"], reshard_after_forward=False, mp_policy=policy)
    else:
        _shard(model, root_unit, meshes, policy)
    if dist.get_backend() == "gloo":
        scatter_in_rings(model)
    apply_step_options(model, plan)
    allow_in_place(model)
    return model


_POLICIES: dict[Precision, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def _shard_operators(
    parent: nn.Module, unit: Unit, meshes: dict[ShardOver, DeviceMesh], policy: MixedPrecisionPolicy
) -> None:
    modules = [parent.get_submodule(name) for name in unit.modules]
    _shard(modules[0] if len(modules) == 1 else modules, unit, meshes, policy)


def _shard(
    module: nn.Module | list[nn.Module],
    unit: Unit,
    meshes: dict[ShardOver, DeviceMesh],
    policy: MixedPrecisionPolicy,
) -> None:
    choice = unit.choice
    try:
        fully_shard(module, mesh=meshes[choice.shard_over], reshard_after_forward=choice.regather, mp_policy=policy)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ShardingError(", ".join(unit.operators), str(error).splitlines()[0]) from error
    first = module[0] if isinstance(module, list) else module
    if meshes[choice.shard_over].size(-1) == 1:
        replicate_in_place(first)
    if choice.keep_node_shard:
        _keep_node_shard(first, meshes["node"])


def _keep_node_shard(module: FSDPModule, mesh: DeviceMesh) -> None:
    """What `reshard_after_forward=<ranks of a node>` does, on one mesh for all units.

    torch 2.13 would make process groups of their own for each.
    """
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def _meshes(plan: Plan, device_type: str) -> dict[ShardOver, DeviceMesh]:
    """One mesh per way to share: a row for the world, (world, 1) for replicas, (nodes, per node) inside nodes."""
    num_ranks = plan.num_ranks
    names = ("replicate", "shard")
    meshes: dict[ShardOver, DeviceMesh] = {
        "world": init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("shard",))
    }
    needed = {unit.choice.shard_over for section in plan.sections for unit in section.units}
    if "none" in needed:
        meshes["none"] = init_device_mesh(device_type, (num_ranks, 1), mesh_dim_names=names)
    if "node" in needed or any(unit.choice.keep_node_shard for section in plan.sections for unit in section.units):
        per_node = plan.ranks_per_node[0]
        meshes["node"] = init_device_mesh(device_type, (len(plan.ranks_per_node), per_node), mesh_dim_names=names)
    return meshes


def _innermost_first(units: Iterable[Unit]) -> list[Unit]:
    """Units whose modules lie inside another unit's modules come before it: `fully_shard` works bottom-up."""
    left, ordered = list(units), []
    while left:
        inner = [unit for unit in left if not any(_lies_in(other, unit) for other in left if other is not unit)]
        ordered += inner or left  # of two that lie in each other, neither comes first
        left = [unit for unit in left if unit not in ordered]
    return ordered


def _lies_in(unit: Unit, other: Unit) -> bool:
    return any(
        not path or name.startswith(f"{path}.") for path in other.modules for name in unit.modules if name != path
    )


def free_gathered(model: nn.Module) -> None:
    """Frees what units keep from a forward whose backward never comes, where they would hold it until the next one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:  # torch 2.13 leaves a node's shard where it is
                    parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None


def _split(model: nn.Module, plan: Plan) -> None:
    """Puts slices in the place of the operators that the plan splits."""
    known = {name for name, _ in model.named_modules()}
    for section in plan.sections:
        for operator, num_slices in section.splits.items():
            path = f"{section.name}.{operator}" if section.is_block else operator
            if path not in known:
                raise PlanMismatchError("a model with module", repr(path), "not there")
            split_operator(model, path, num_slices)


def _check_shapes(model: nn.Module, plan: Plan) -> None:
    """Raises PlanMismatchError where a block has other parameters than it was planned with, or the model has."""
    if len(plan.parameter_counts) != len(plan.sections):
        return  # a plan of before they were told
    known = dict(model.named_modules())
    for section, planned in zip(plan.sections, plan.parameter_counts, strict=True):
        if section.is_block and section.name in known:
            found = sum(parameter.numel() for parameter in known[section.name].parameters())
            if found != planned:
                raise PlanMismatchError(f"a {section.name!r} of", f"{planned:,} parameters", f"{found:,}")
    planned = sum(plan.parameter_counts)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != planned:
        raise PlanMismatchError("a model of", f"{planned:,} parameters", f"{found:,}")


def _check_operators(model: nn.Module, plan: Plan) -> None:
    planned = {name for section in plan.sections for name in section.parameter_modules}
    found = {name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    there = {name for name, module in model.named_modules() if any(True for _ in module.parameters())}
    if missing := sorted(planned - there):
        raise PlanMismatchError("a model with module", repr(missing[0]), "not there")
    around = tuple(f"{name}." for name in planned if name)  # gathered with a module around them
    if unknown := sorted(name for name in found - planned if not name.startswith(around) and "" not in planned):
        raise PlanMismatchError("a model without parameters in", repr(unknown[0]), "there")
