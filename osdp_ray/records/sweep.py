"""SweepResult: what every memory budget of a sweep buys."""

import dataclasses
import os
from pathlib import Path

from osdp_ray.schema import Record, format_table, record
from osdp_ray.units import format_bytes, format_bytes_up

_PARQUET_TYPES = {
    int: "int64",
    int | None: "int64",
    float | None: "float64",
    bool: "bool_",
    str: "string",
    str | None: "string",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One budget per device. Where nothing fits, `smallest_budget_bytes` would, and what speaks of a plan is None.

    `best_uniform` is the fastest setting that treats all operators alike and fits, None where none does. `measured_*`
    are None where the budget was not measured; `measured_problem` says why a measurement failed.
    """

    budget_bytes: int
    fits: bool
    smallest_budget_bytes: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    predicted_samples_per_s: float | None = None
    plan_label: str = ""
    best_uniform: str | None = None
    best_uniform_samples_per_s: float | None = None
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    measured_samples_per_s: float | None = None
    measured_problem: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether a measurement was tried."""
        return self.measured_samples_per_s is not None or self.measured_problem is not None


@record("sweep", version=1)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult(Record):
    """A sweep over memory budgets, one row per budget in ascending order. `measure_steps` is 0 where nothing ran."""

    workload: str
    workload_hash: str
    ranks_per_node: tuple[int, ...]
    measure_steps: int
    rows: tuple[SweepRow, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_node)

    def table(self) -> str:
        """The sweep for a terminal: a line per budget, then what did not fit and what failed."""
        measured = any(row.is_measured for row in self.rows)
        header: tuple[str, ...] = ("budget", "batch", "peak", "samples/s", "best uniform", "its samples/s", "gain")
        header += ("measured peak", "measured samples/s") if measured else ()
        rows = []
        for row in self.rows:
            cells = _planned_cells(row) + (_measured_cells(row) if measured else ())
            rows.append((*cells, row.plan_label if row.fits else "does not fit"))
        lines = [format_table((*header, "plan"), rows)]
        smallest_bytes = [row.smallest_budget_bytes for row in self.rows if row.smallest_budget_bytes is not None]
        if smallest_bytes:
            lines.append(f"the smallest budget that fits is {format_bytes_up(min(smallest_bytes))}")
        lines += [
            f"{format_bytes(row.budget_bytes)} could not be measured: {row.measured_problem}"
            for row in self.rows
            if row.measured_problem is not None
        ]
        return "\n".join(lines)

    def save_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes one row per budget, one column per field of SweepRow, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = dataclasses.fields(SweepRow)
        schema = pa.schema([pa.field(f.name, getattr(pa, _PARQUET_TYPES[f.type])()) for f in fields])  # type: ignore[index]
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            pq.write_table(
                pa.Table.from_pylist([dataclasses.asdict(row) for row in self.rows], schema=schema), temporary
            )
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def _planned_cells(row: SweepRow) -> tuple[str, ...]:
    budget, per_s, uniform_per_s = row.budget_bytes, row.predicted_samples_per_s, row.best_uniform_samples_per_s
    if per_s is None or row.predicted_peak_bytes is None:
        return (format_bytes(budget), "-", "-", "-", "-", "-", "-")
    return (
        format_bytes(budget),
        f"{row.micro_batch} x {row.accumulation}",
        format_bytes(row.predicted_peak_bytes),
        f"{per_s:.1f}",
        row.best_uniform or "none fits",
        "-" if uniform_per_s is None else f"{uniform_per_s:.1f}",
        "-" if uniform_per_s is None else f"{(per_s / uniform_per_s - 1) * 100:+.1f} %",
    )


def _measured_cells(row: SweepRow) -> tuple[str, ...]:
    peak_bytes, per_s = row.measured_peak_bytes, row.measured_samples_per_s
    return (
        "-" if peak_bytes is None else format_bytes(peak_bytes),
        "failed" if row.measured_problem is not None else "-" if per_s is None else f"{per_s:.1f}",
    )
