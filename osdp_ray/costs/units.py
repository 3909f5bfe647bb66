"""Bytes of an FSDP unit: what a choice does to the parameters of the operators that share it."""

import dataclasses

from osdp_ray.records.plan import ShardOver, Unit
from osdp_ray.records.profile import SectionClass


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Sizes of one unit on the rank that holds the most (shards are padded to the first rank's).

    shard_bytes     parameters held between steps
    flat_bytes      buffer of the gather, 0 where nothing is gathered
    gathered_bytes  whole parameters while they are in use (a replicated unit copies its parameters too)
    reduce_bytes    input of the gradient reduction
    gradient_bytes  its output, the gradient held until the optimizer's step
    last_gradient_bytes  the whole gradient of the last parameter; where they are scattered it outlives the others
    padding_copy_bytes   copies that the scatter makes of gradients whose first dimension does not divide by the group
    """

    group_size: int
    shard_bytes: int
    flat_bytes: int
    gathered_bytes: int
    reduce_bytes: int
    gradient_bytes: int
    num_trainable: int
    largest_trainable_bytes: int
    last_gradient_bytes: int
    padding_copy_bytes: int


def group_size(shard_over: ShardOver, ranks_per_node: tuple[int, ...]) -> int:
    """How many ranks share one copy of the state."""
    if shard_over == "none":
        return 1
    return ranks_per_node[0] if shard_over == "node" else sum(ranks_per_node)


def unit_bytes(section_class: SectionClass, unit: Unit, ranks_per_node: tuple[int, ...]) -> UnitBytes:
    """Sizes of a unit of a section of this class."""
    size = group_size(unit.choice.shard_over, ranks_per_node)
    wanted = set(unit.operators)
    operators = [operator for operator in section_class.operators if operator.name in wanted]
    parameters = [section_class.parameters[index] for operator in operators for index in operator.parameters]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    shard = sum(parameter.shard_bytes(size) for parameter in parameters)
    gradient = sum(parameter.shard_bytes(size) for parameter in trainable)
    return UnitBytes(
        group_size=size,
        shard_bytes=shard,
        flat_bytes=shard * size if size > 1 else 0,
        gathered_bytes=shard * size,
        reduce_bytes=gradient * size,
        gradient_bytes=gradient,
        num_trainable=len(trainable),
        largest_trainable_bytes=max((parameter.shard_bytes(size) for parameter in trainable), default=0),
        last_gradient_bytes=trainable[-1].num_bytes if trainable and size > 1 else 0,
        padding_copy_bytes=sum(p.shard_bytes(size) * size for p in trainable if p.shape and p.shape[0] % size),
    )
