"""Recomputation of a block's activations in backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from osdp_ray.records.profile import Recompute

# A cache of keys and values would be extended a second time by the recomputation; transformers leaves it out as well.
_WITHOUT_CACHE = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}


def recompute_block(block: nn.Module, recompute: Recompute) -> None:
    """Makes a block keep only its inputs for backward and run its forward again there ('full').

    `forward` itself is replaced on the instance: names of parameters and hooks on the module stay as they are.
    """
    if recompute != "full":
        raise ValueError(f"recompute={recompute!r} is not built; use 'none' or 'full'")
    forward = block.forward

    def recomputed(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs |= {name: value for name, value in _WITHOUT_CACHE.items() if kwargs.get(name)}
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]
