"""Summary: what a run predicted, measured and reached."""

import dataclasses

from osdp_ray.schema import Record, format_table, record
from osdp_ray.units import format_bytes, format_seconds


@record("summary", version=1)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary(Record):
    """The end of a run. Predictions and measurements are those of its last plan.

    `measured_peak_bytes` is the highest of each rank, None where no step of that plan was measured. `measured_step_s`
    is the median over steps of the slowest rank, without the first step and, on CPU, without those that the profiler
    slowed down. `num_restarts` counts re-plans that restarted the workers, `num_failed_saves` saves that could not
    be written while training went on, `stage_s` the seconds of each stage.
    """

    workload: str
    workload_hash: str
    num_ranks: int
    global_batch: int
    micro_batch: int
    seed: int
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: tuple[int | None, ...]
    predicted_step_s: float
    measured_step_s: float | None
    samples_per_s: float | None
    first_loss: float | None
    final_loss: float | None
    eval_loss: float | None
    num_steps: int
    num_plans: int
    num_restarts: int
    stage_s: dict[str, float]
    num_failed_saves: int = 0

    def table(self) -> str:
        """The summary for a terminal."""
        measured = [peak for peak in self.measured_peak_bytes if peak is not None]
        step_s, per_s = self.measured_step_s, self.samples_per_s
        rows = [
            ("peak", format_bytes(self.predicted_peak_bytes), format_bytes(max(measured)) if measured else "-"),
            ("step", format_seconds(self.predicted_step_s), "-" if step_s is None else format_seconds(step_s)),
            (
                "samples/s",
                f"{self.global_batch / self.predicted_step_s:.1f}" if self.predicted_step_s > 0 else "-",
                "-" if per_s is None else f"{per_s:.1f}",
            ),
        ]
        losses = (("first", self.first_loss), ("final", self.final_loss), ("held-out", self.eval_loss))
        text = ", ".join(f"{name} {loss:.4f}" for name, loss in losses if loss is not None)
        failed = f"; {self.num_failed_saves} saves failed" if self.num_failed_saves else ""
        table = format_table(("", "predicted", "measured"), rows)
        return f"{table}\n\nloss: {text or 'none'}; {self.num_steps} steps{failed}"
