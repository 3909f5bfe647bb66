"""Telemetry as Parquet: one row per sample, one column per field of Sample."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from osdp_ray.errors import RecordError
from osdp_ray.records.telemetry import Sample, Telemetry

_COLUMNS = {int: "int64", float: "float64", int | None: "int64"}


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field(f.name, getattr(pa, _COLUMNS[f.type])(), nullable=f.type == (int | None))  # type: ignore[index]
            for f in dataclasses.fields(Sample)
        ]
    )


def save_parquet(telemetry: Telemetry, path: str | os.PathLike[str]) -> None:
    """Writes one row per sample, one column per field of Sample, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [dataclasses.asdict(sample) for sample in telemetry.samples]
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_parquet(path: str | os.PathLike[str]) -> Telemetry:
    """Reads what `save_parquet` wrote. Raises RecordError for a missing, damaged or other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open(path, "rb") as file:
            table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise RecordError(str(path), f"it is no readable Parquet file ({str(error).splitlines()[0]})") from error
    names = [field.name for field in dataclasses.fields(Sample)]
    if missing := [name for name in names if name not in table.column_names]:
        raise RecordError(str(path), f"it has no column {missing[0]!r}, so it is no telemetry of this release")
    return Telemetry(samples=tuple(Sample(**row) for row in table.select(names).to_pylist()))
