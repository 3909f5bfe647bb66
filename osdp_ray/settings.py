"""What a user asks of a run, and the checks that need neither cluster nor model."""

import dataclasses
from typing import Any

from osdp_ray.errors import UsageError
from osdp_ray.execution.options import TrainOptions
from osdp_ray.records.plan import ScatterGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user asks of a run; see `pipeline.run`."""

    num_workers: int | None
    budget_bytes: int | None
    global_batch: int
    micro_batch: int | None
    prefetch: int | None
    scatter_group: ScatterGroup
    resume: bool
    address: str | None
    max_replans: int
    options: TrainOptions

    @property
    def of_plans(self) -> dict[str, Any]:
        """What every plan of the run must keep to, as arguments of `plan`."""
        return {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "prefetch": self.prefetch,
            "scatter_group": self.scatter_group,
        }


def check_settings(settings: Settings) -> None:
    """Raises UsageError for the first setting that cannot work, naming its flag."""
    options = settings.options
    for flag, value, least in (
        ("--steps", options.num_steps, 1),
        ("--global-batch", settings.global_batch, 1),
        ("--num-workers", settings.num_workers, 1),
        ("--micro-batch", settings.micro_batch, 1),
        ("--prefetch", settings.prefetch, 0),
        ("--memory-budget", settings.budget_bytes, 1),
        ("--save-every", options.save_every, 0),
        ("--eval-every", options.eval_every, 0),
        ("--keep-saves", options.saves_kept, 1),
        ("--max-replans", settings.max_replans, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{flag} is {value}, and at least {least} is needed.")
    if settings.num_workers is not None:
        check_batches(settings.global_batch, settings.num_workers, settings.micro_batch)


def check_batches(global_batch: int, num_workers: int, micro_batch: int | None) -> None:
    """Raises UsageError unless every worker gets the same whole number of micro-batches."""
    of_each = num_workers * (micro_batch or 1)
    if global_batch % of_each == 0:
        return
    below, above = global_batch // of_each * of_each, -(-global_batch // of_each) * of_each
    divisor = f"{num_workers} workers" + (f" x micro-batch {micro_batch}" if micro_batch else "")
    near = f"{below} or {above}" if below else str(above)
    raise UsageError(
        f"a global batch of {global_batch} cannot be divided by {divisor} = {of_each}. "
        f"Give --global-batch {near}, or change --num-workers or --micro-batch."
    )
