"""What the step simulator keeps while it plays, and the levels that it finds."""

import dataclasses

from osdp_ray.costs.units import UnitBytes
from osdp_ray.records.plan import Choice

PHASES = ("forward", "loss", "backward", "optimizer")  # of a step; "evaluation" lies between steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionBytes:
    """One section in one pass: the level before and after it, and the highest live bytes within.

    A level is what is live apart from buffers that pass with the neighbours: flat buffers of gathers and the input of
    the last reduction.
    """

    before_bytes: int
    peak_bytes: int
    after_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassBytes:
    """One micro-batch. `forward[i]` and `backward[i]` belong to the plan's section i."""

    forward: tuple[SectionBytes, ...]
    backward: tuple[SectionBytes, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What one step holds. `passes` are its micro-batches, as many of them as differ."""

    persistent_bytes: int
    peak_by_phase: dict[str, int]
    passes: tuple[PassBytes, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_by_phase.values())


class Held:
    """A buffer that outlives its section, and how many hold it."""

    __slots__ = ("holders", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.holders = num_bytes, 1


class PlayedUnit:
    """A unit while a step is played."""

    __slots__ = (
        "all_reduces",
        "exits",
        "exits_of",
        "first",
        "full_gradient_bytes",
        "gathered",
        "gradient_bytes",
        "has_node_shard",
        "has_shard_gradient",
        "is_cut_short",
        "last",
        "modules_of",
        "num_begun",
        "num_modules",
        "order",
        "pending",
        "phase",
        "regather",
        "sizes",
    )

    def __init__(self, sizes: UnitBytes, choice: Choice, modules_of: dict[int, int]) -> None:
        self.sizes, self.regather, self.modules_of = sizes, choice.regather, modules_of
        self.num_modules = sum(modules_of.values())
        self.all_reduces = choice.shard_over != "world"
        self.gathered = self.pending = self.has_shard_gradient = self.has_node_shard = False
        self.full_gradient_bytes = 0  # whole gradients that wait for a micro-batch that synchronises
        self.order: list[int] = []  # positions in the order of forward
        self.reset()

    def reset(self) -> None:
        self.exits = self.gradient_bytes = 0
        self.exits_of: dict[int, int] = {}  # how many modules of an operator have run, however often each
        self.first = self.last = -3  # the operators that ran first and last, whose hooks run in backward
        self.num_begun = 0  # modules that are yet to be recomputed, where some of them were
        self.is_cut_short = False  # FSDP2 has forgotten that its backward runs
        self.phase = "idle"  # idle, before (backward has begun), after
