"""Random state of one rank: of torch on the CPU and its GPU, of Python's `random` and of numpy's global generator.

All of it becomes tensors, so that a save holds it beside everything else, one set per rank.
"""

import hashlib
import random

import numpy as np
import torch

_NUMPY_KIND = "MT19937"


def derive_seed(*parts: int) -> int:
    """A seed of 63 bits that differs wherever any of the parts does."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds every generator that a model or its data may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(rank: int) -> dict[str, torch.Tensor]:
    """The state by name, `random.<generator>.<rank>`. Words of 32 bits are exact in float64."""
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    version, words, gauss = random.getstate()
    states[f"random.python.{rank}"] = _floats(version, *words, *_optional(gauss))
    kind, keys, *rest = np.random.get_state(legacy=True)
    if kind == _NUMPY_KIND:
        states[f"random.numpy.{rank}"] = _floats(*keys.tolist(), *rest)
    return states


def set_random_state(states: dict[str, torch.Tensor], fallback_seed: int) -> None:
    """Puts back what `random_state` gave; generators that are not in it start from `fallback_seed`."""
    seed_all(fallback_seed)
    for name, state in states.items():
        generator = name.split(".")[1]
        if generator == "cuda":
            torch.cuda.set_rng_state(state)
        elif generator == "cpu":
            torch.set_rng_state(state)
        elif generator == "python":
            version, *words, has_gauss, gauss = state.tolist()
            random.setstate((int(version), tuple(map(int, words)), gauss if has_gauss else None))
        elif generator == "numpy":
            *keys, position, has_gauss, gauss = state.tolist()
            np.random.set_state((_NUMPY_KIND, np.array(keys, dtype=np.uint32), int(position), int(has_gauss), gauss))


def _floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _optional(value: float | None) -> tuple[float, float]:
    return (0.0, 0.0) if value is None else (1.0, value)
