"""Bytes of an FSDP unit: what a choice does to the parameters of the operators that share it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from osdp_ray.records.plan import FLAT_BELOW_BYTES, ShardOver, Unit
from osdp_ray.records.profile import DeviceKind, Parameter, Precision, SectionClass


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Sizes of one unit on the rank that holds the most (shards are padded to the first rank's).

    granule         what sizes of tensors are rounded up to
    shard_bytes     parameters held between steps
    flat_bytes      buffer of the gather, 0 where nothing is gathered
    cast_bytes      the shards in the compute type, while they are copied into the flat buffer
    gathered_bytes  whole parameters while they are in use; of a replicated unit those that are cast, others are used
                    as they are stored
    copy_peak_bytes highest while the whole parameters are allocated, above the level before
    node_shard_bytes      what is kept of them after forward where a node's shard is, 0 elsewhere
    node_shard_peak_bytes highest while it is copied out of them, parameter by parameter, above the level before
    reduce_bytes    input of the gradient reduction, 0 where gradients are reduced in place
    gradient_bytes  its output, the gradient held until the optimizer's step
    replica_bytes   what a replicated unit reduces at once: its large gradients one by one, then the others in a buffer
    replica_peak_bytes, replica_peak_waited_bytes, replica_peak_added_bytes  highest while gradients become those of the
                    stored parameters, above the level before: of new ones, of ones that waited in the type of the
                    reduction, of ones that are added to what is there
    last_gradient_bytes  the whole gradient of the last parameter; where they are scattered it outlives the others
    last_full_gradient_bytes  the same in the type of the reduction
    accumulate_peak_bytes  highest while gradients are added one by one to those that wait in another type, above the
                         level before: a CPU casts each one first
    full_per_gradient    bytes of a gradient in the type of the reduction per byte of one as it is computed
    scatter_copy_bytes   copies that a CPU makes of gradients for the reduction: of those whose first dimension does not
                         divide by the group, and of each in turn where the types differ
    scatter_copy_full_bytes  the same of gradients that waited in the type of the reduction
    """

    group_size: int
    granule: int
    shard_bytes: int
    flat_bytes: int
    cast_bytes: int
    gathered_bytes: int
    copy_peak_bytes: int
    node_shard_bytes: int
    node_shard_peak_bytes: int
    reduce_bytes: int
    gradient_bytes: int
    replica_bytes: tuple[int, ...]
    replica_peak_bytes: int
    replica_peak_waited_bytes: int
    replica_peak_added_bytes: int
    num_trainable: int
    largest_trainable_bytes: int
    last_gradient_bytes: int
    last_full_gradient_bytes: int
    accumulate_peak_bytes: int
    full_per_gradient: float
    scatter_copy_bytes: int
    scatter_copy_full_bytes: int
    trainable: tuple[Parameter, ...]

    def local_bytes(self, index: int) -> int:
        """Trainable bytes of the rank of this index in the group, without padding."""
        return sum(round_up(p.local_bytes(self.group_size, index), self.granule) for p in self.trainable)


# CUDA's caching allocator rounds every size up to this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
GRANULE_BYTES: dict[DeviceKind, int] = {"cpu": 1, "cuda": 512}


def round_up(num_bytes: int, granule: int) -> int:
    """The next multiple of the granule."""
    return -(-num_bytes // granule) * granule


def group_size(shard_over: ShardOver, ranks_per_node: tuple[int, ...]) -> int:
    """How many ranks share one copy of the state."""
    if shard_over == "none":
        return 1
    return ranks_per_node[0] if shard_over == "node" else sum(ranks_per_node)


def unit_bytes(
    section_class: SectionClass,
    unit: Unit,
    ranks_per_node: tuple[int, ...],
    precision: Precision,
    device_kind: DeviceKind = "cpu",
) -> UnitBytes:
    """Sizes of a unit of a section of this class, as the device's allocator rounds those of tensors that are held."""
    granule = GRANULE_BYTES[device_kind]
    size = group_size(unit.choice.shard_over, ranks_per_node)
    wanted = set(unit.operators)
    operators = [operator for operator in section_class.operators if operator.name in wanted]
    parameters = [section_class.parameters[index] for operator in operators for index in operator.parameters]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]

    def computed(parameter: Parameter) -> int:
        """A padded shard in the type that is computed with."""
        itemsize = _COMPUTE_BYTES[precision] or parameter.itemsize_bytes
        return parameter.shard_bytes(size) // parameter.itemsize_bytes * itemsize

    shard = sum(map(computed, parameters))
    gradient = sum(parameter.shard_bytes(size) for parameter in trainable)
    casts = [
        computed(parameter) if computed(parameter) != parameter.shard_bytes(size) else 0 for parameter in parameters
    ]
    last = trainable[-1] if trainable else None
    copied = [size > 1 or cast > 0 for cast in casts]  # a replicated unit uses what is stored where it can
    gathered = [
        round_up(computed(parameter) * size, granule) if is_copied else 0
        for parameter, is_copied in zip(parameters, copied, strict=True)
    ]
    kept = [0] * len(parameters)
    if unit.choice.keep_node_shard:
        kept = [round_up(computed(parameter) * size // ranks_per_node[0], granule) for parameter in parameters]
    large = [parameter for parameter in trainable if size == 1 and parameter.num_bytes >= FLAT_BELOW_BYTES]
    flat = sum(parameter.num_bytes for parameter in trainable if parameter not in large) if size == 1 else 0
    replica = [round_up(num_bytes, granule) for num_bytes in (*(p.num_bytes for p in large), flat) if num_bytes]
    flat = round_up(flat, granule)
    return UnitBytes(
        group_size=size,
        granule=granule,
        shard_bytes=sum(round_up(parameter.shard_bytes(size), granule) for parameter in parameters),
        flat_bytes=round_up(shard * size, granule) if size > 1 else 0,
        cast_bytes=sum(casts) if size > 1 else 0,
        gathered_bytes=sum(gathered),
        node_shard_bytes=sum(kept),
        node_shard_peak_bytes=_exchange_peak(kept, gathered),
        copy_peak_bytes=sum(
            computed(parameter) * size for parameter, is_copied in zip(parameters, copied, strict=True) if is_copied
        ),
        reduce_bytes=round_up(gradient * size, granule) if size > 1 else 0,
        gradient_bytes=gradient if size > 1 else sum(replica),
        replica_bytes=tuple(replica),
        replica_peak_bytes=_replica_peak(large, flat, computed, is_added=False),
        replica_peak_waited_bytes=flat,
        replica_peak_added_bytes=_replica_peak(large, flat, computed, is_added=True),
        num_trainable=len(trainable),
        largest_trainable_bytes=max((parameter.shard_bytes(size) for parameter in trainable), default=0),
        last_gradient_bytes=last.numel * (_COMPUTE_BYTES[precision] or last.itemsize_bytes) if last and size > 1 else 0,
        last_full_gradient_bytes=last.num_bytes if last and size > 1 else 0,
        accumulate_peak_bytes=_accumulate_peak(trainable, _COMPUTE_BYTES[precision]),
        full_per_gradient=last.itemsize_bytes / (_COMPUTE_BYTES[precision] or last.itemsize_bytes) if last else 1.0,
        scatter_copy_bytes=sum(computed(p) * size for p in trainable if p.shape and p.shape[0] % size)
        + max((computed(p) * size for p in trainable if computed(p) != p.shard_bytes(size)), default=0),
        scatter_copy_full_bytes=sum(p.shard_bytes(size) * size for p in trainable if p.shape and p.shape[0] % size),
        trainable=tuple(trainable),
    )


_COMPUTE_BYTES: dict[Precision, int] = {"fp32": 0, "bf16": 2}  # 0: as the parameter is


def _replica_peak(
    large: list[Parameter], flat_bytes: int, computed: Callable[[Parameter], int], *, is_added: bool
) -> int:
    """Highest while gradients as they were computed become those of the type of the reduction, one by one."""
    highest = level = 0
    for parameter in large:
        cast = parameter.num_bytes if computed(parameter) != parameter.num_bytes else 0
        highest = max(highest, level + cast)
        if is_added or cast:
            level -= computed(parameter)
        if not is_added:
            level += cast
    return max(highest, level + flat_bytes)


def _exchange_peak(sizes: list[int], freed: list[int]) -> int:
    """Highest while buffers are allocated one by one, each before another one is freed."""
    highest = level = 0
    for num_bytes, gone in zip(sizes, freed, strict=True):
        highest = max(highest, level + num_bytes)
        level += num_bytes - gone
    return highest


def _accumulate_peak(parameters: list[Parameter], compute_bytes: int) -> int:
    if not compute_bytes:
        return 0
    highest = freed = 0
    for parameter in parameters:
        highest = max(highest, parameter.num_bytes - freed)
        freed += parameter.numel * compute_bytes
    return highest


# A unit that holds nothing: what is left of a section's bytes is its activations.
_NOTHING: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(UnitBytes)), 0)
WEIGHTLESS = UnitBytes(**_NOTHING | {"group_size": 1, "full_per_gradient": 1.0, "trainable": (), "replica_bytes": ()})
