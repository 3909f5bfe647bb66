"""Telemetry: what every worker measured in every step."""

import dataclasses

from osdp_ray.schema import Record, record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One rank's view of one optimizer step.

    `peak_bytes` is the highest allocated in the step, None in steps that were not sampled. `persistent_bytes` is what
    stays between steps (parameters, optimizer state, buffers). `loss` is the mean over the global batch, of which
    `num_samples` is the size.
    """

    plan_index: int
    rank: int
    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    num_samples: int
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: int | None
    persistent_bytes: int
    reserved_bytes: int | None
    resident_bytes: int
    num_retries: int


@record("telemetry", version=1)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Telemetry(Record):
    """The samples of a run, in the order of arrival."""

    samples: tuple[Sample, ...]

    def of_plan(self, plan_index: int) -> "Telemetry":
        return Telemetry(samples=tuple(sample for sample in self.samples if sample.plan_index == plan_index))

    def peak_bytes_by_rank(self) -> dict[int, int]:
        """Highest measured peak of each rank that has one."""
        peaks: dict[int, int] = {}
        for sample in self.samples:
            if sample.peak_bytes is not None:
                peaks[sample.rank] = max(peaks.get(sample.rank, 0), sample.peak_bytes)
        return dict(sorted(peaks.items()))
