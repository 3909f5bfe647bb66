"""Plain values of a save's record: what optimizers and schedulers hold beside tensors, as JSON gives it back."""

from typing import Any

import torch

from osdp_ray.errors import SaveError

_ITEMS = "<items>"  # the key under which a dict with other keys than texts lists its items


def plain(what: str, value: Any) -> Any:
    """`value` with scalar tensors as numbers; raises SaveError where JSON could not give it back."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(what, item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: plain(what, item) for key, item in value.items()}
        return {_ITEMS: [[plain(what, key), plain(what, item)] for key, item in value.items()]}
    raise SaveError(
        "",
        f"{what} holds a {type(value).__name__}, which a save cannot keep as plain values",
        "Use numbers and tensors",
    )


def like(current: Any, saved: Any) -> Any:
    """What `plain` made, as values of the kinds that `current` has: tuples, and dicts of any keys."""
    if isinstance(saved, dict) and set(saved) == {_ITEMS}:
        saved = dict(saved[_ITEMS])
    if isinstance(saved, dict):
        known = current if isinstance(current, dict) else {}
        values = {key: like(known.get(key), item) for key, item in saved.items()}
        return type(current)(values) if isinstance(current, dict) else values
    if isinstance(saved, list):
        known = list(current) if isinstance(current, list | tuple) else []
        known += [known[-1] if known else None] * (len(saved) - len(known))
        values = [like(one, item) for one, item in zip(known, saved, strict=False)]
        return tuple(values) if isinstance(current, tuple) else values
    return saved


def group_settings(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The settings of an optimizer's parameter groups."""
    return tuple(
        {key: plain(f"optimizer setting {key!r}", value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    )


def set_group_settings(optimizer: torch.optim.Optimizer, settings: tuple[dict[str, Any], ...], path: Any) -> None:
    """Puts back what `group_settings` gave. Raises SaveError for another number of groups."""
    if len(settings) != len(optimizer.param_groups):
        raise SaveError(
            str(path),
            f"its optimizer has {len(settings)} parameter groups, and this one {len(optimizer.param_groups)}",
            "Resume with the optimizer that it was made with",
        )
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = like(group.get(key), value)
