"""Step shapes: how a global batch comes about, and the options of a step."""

from collections.abc import Iterator

from osdp_ray.errors import UsageError
from osdp_ray.planning.menus import StepShape
from osdp_ray.records.plan import ScatterGroup
from osdp_ray.records.profile import Profile

_MAX_FREE_MICRO_BATCH = 512
_MAX_PREFETCH = 3  # the simulator plays as many equal sections at the ends of a row


def batch_shapes(num_ranks: int, global_batch: int | None, micro_batch: int | None) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulation) pairs that make the global batch exactly, large micro-batches last."""
    if global_batch is None:
        sizes = [micro_batch] if micro_batch else [1 << power for power in range(_MAX_FREE_MICRO_BATCH.bit_length())]
        yield from ((size, 1) for size in sizes)
        return
    if global_batch <= 0 or (micro_batch is not None and micro_batch <= 0):
        raise UsageError("--global-batch and --micro-batch count samples: give numbers above 0.")
    unit = num_ranks * (micro_batch or 1)
    if global_batch % unit:
        lower, upper = global_batch // unit * unit, (global_batch // unit + 1) * unit
        fitting = f"{lower} or {upper}" if lower else str(upper)
        each = f" x micro-batch {micro_batch}" if micro_batch else ""
        raise UsageError(
            f"a global batch of {global_batch} does not divide among {num_ranks} workers{each}. "
            f"Use --global-batch {fitting}, or another --num-workers" + (" or --micro-batch." if micro_batch else ".")
        )
    per_rank = global_batch // num_ranks
    sizes = [micro_batch] if micro_batch else [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    yield from ((size, per_rank // size) for size in sizes)


def step_shapes(
    profile: Profile,
    *,
    global_batch: int | None,
    micro_batch: int | None,
    prefetch: int | None,
    scatter_group: ScatterGroup,
) -> list[StepShape]:
    """All shapes of a step that make the global batch. Raises UsageError."""
    prefetch = profile.default_prefetch if prefetch is None else prefetch
    if not profile.default_prefetch <= prefetch <= _MAX_PREFETCH:
        why = ": its backend communicates beside computing, and hides no gather that is not ahead"
        raise UsageError(
            f"a prefetch of {prefetch} units is not between {profile.default_prefetch} and {_MAX_PREFETCH} for this "
            f"profile{why if prefetch == 0 else ''}. Give another --prefetch, or leave it out."
        )
    return [
        StepShape(
            micro_batch=size,
            accumulation=accumulation,
            synchronise=synchronise,
            prefetch=prefetch,
            scatter_group=scatter_group,
        )
        for size, accumulation in batch_shapes(profile.num_ranks, global_batch, micro_batch)
        for synchronise in (("every", "last") if accumulation > 1 else ("every",))
    ]
