"""What every benchmark shares: its flags, a line about the machine, medians with their spread, the JSON file."""

import argparse
import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osdp_ray.schema import write_json


def flag_parser(description: str) -> argparse.ArgumentParser:
    """`--quick` (under 60 s) and `--json FILE`, for a benchmark to add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats, under 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def parse_flags(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags that every benchmark has."""
    return flag_parser(description).parse_args(arguments)


def machine() -> str:
    """The machine and the day, for the line under a table."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    day = datetime.date.today().isoformat()
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} CPUs ({model}), {system}, {day}"


def spread(values: Sequence[float]) -> str:
    """'median (min to max)' with two digits behind the point."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Writes a benchmark's figures, with the machine, where `--json` asks for it."""
    if path is not None:
        write_json(path, {**figures, "machine": machine()})
