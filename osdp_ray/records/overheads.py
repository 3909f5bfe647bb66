"""What training takes beside computing and collectives, as a profile has it."""

import dataclasses
from typing import Literal

ShardOver = Literal["none", "node", "world"]  # who shares one copy of a unit: each rank has its own, a node, all ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitOverhead:
    """Seconds that FSDP2 spends on one unit beside its collectives and copies.

    Its hooks, views and DTensors made anew, and what is lost where ranks wait for one another. `gather_...` each time
    that it is made ready, before forward and, if it was freed, before backward; `reduce_...` after its gradients. Each
    has a part per unit, one per parameter tensor, and one per byte of what is gathered or reduced.
    """

    shard_over: ShardOver
    gather_s: float
    gather_s_per_tensor: float
    gather_s_per_byte: float
    reduce_s: float
    reduce_s_per_tensor: float
    reduce_s_per_byte: float

    def gathering_s(self, num_tensors: int, num_bytes: int) -> float:
        """Seconds each time before a unit is used."""
        return self.gather_s + self.gather_s_per_tensor * num_tensors + self.gather_s_per_byte * num_bytes

    def reducing_s(self, num_tensors: int, num_bytes: int) -> float:
        """Seconds after its gradients are there."""
        return self.reduce_s + self.reduce_s_per_tensor * num_tensors + self.reduce_s_per_byte * num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassOverhead:
    """Seconds of a micro-batch beside its sections: FSDP2's root (`pass_s`), and making the batch (`sample_s` each)."""

    pass_s: float = 0.0
    sample_s: float = 0.0


NO_PASS_OVERHEAD = PassOverhead()
