"""A sweep as a picture: throughput against the memory budget."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osdp_ray.errors import UsageError
from osdp_ray.records.sweep import SweepResult
from osdp_ray.units import GIB, KIB, MIB, format_bytes

_PLAN, _UNIFORM, _MEASURED, _GREY = "#1f5fa8", "#d9822b", "#1a1a1a", "#b8b8b8"


def require_matplotlib() -> None:
    """Raises UsageError where matplotlib is missing; to be called before a long sweep rather than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the plot of a sweep needs matplotlib, which is not installed. Run: pip install 'osdp-ray[plot]'"
        ) from error


def plot(result: SweepResult, path: str | os.PathLike[str]) -> None:
    """Writes one PNG: predicted samples/s of the plan and of the best uniform setting, and what was measured.

    Budgets that do not fit are a grey band. Raises UsageError where matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    divisor, unit = _unit([row.budget_bytes for row in result.rows])
    _draw_lines(axes, result, divisor)
    _draw_unfit(axes, result, divisor)
    axes.set_xlabel(f"memory budget per device ({unit})")
    axes.set_ylabel("throughput (samples/s)")
    axes.set_title(f"{result.workload} on {_count(result.num_ranks, 'worker')}: what memory buys")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _draw_lines(axes: Any, result: SweepResult, divisor: int) -> None:
    planned = [(row.budget_bytes / divisor, row.predicted_samples_per_s) for row in result.rows if row.fits]
    if planned:
        axes.plot(*zip(*planned, strict=True), "-o", color=_PLAN, label="this plan, predicted", zorder=3)
    uniform = [
        (row.budget_bytes / divisor, row.best_uniform_samples_per_s)
        for row in result.rows
        if row.best_uniform_samples_per_s is not None
    ]
    if uniform:
        axes.plot(
            *zip(*uniform, strict=True), "--s", color=_UNIFORM, markersize=5, label="best uniform setting, predicted"
        )
    measured = [
        (row.budget_bytes / divisor, row.measured_samples_per_s)
        for row in result.rows
        if row.measured_samples_per_s is not None
    ]
    if measured:
        label = f"this plan, measured over {_count(result.measure_steps, 'step')}"
        axes.plot(
            *zip(*measured, strict=True),
            linestyle="none",
            marker="D",
            markersize=8,
            markerfacecolor="none",
            markeredgewidth=1.8,
            color=_MEASURED,
            label=label,
            zorder=4,
        )


def _draw_unfit(axes: Any, result: SweepResult, divisor: int) -> None:
    """A band up to the smallest budget that fits, with the budgets that do not fit marked on the axis."""
    unfit = [row for row in result.rows if not row.fits]
    if not unfit:
        return
    bounds = [row.smallest_budget_bytes for row in unfit if row.smallest_budget_bytes is not None]
    smallest_bytes = min(bounds) if bounds else max(row.budget_bytes for row in unfit)
    left = min(row.budget_bytes for row in result.rows)
    right = max(smallest_bytes, *(row.budget_bytes for row in result.rows))
    margin = (right - left) * 0.05 or left * 0.05
    axes.axvspan(
        (left - margin) / divisor,
        smallest_bytes / divisor,
        color=_GREY,
        alpha=0.35,
        linewidth=0,
        label=f"does not fit (below {format_bytes(smallest_bytes)})",
    )
    axes.plot([row.budget_bytes / divisor for row in unfit], [0] * len(unfit), "x", color="#777777", clip_on=False)
    axes.set_xlim((left - margin) / divisor, (right + margin) / divisor)


def _unit(budgets_bytes: Sequence[int]) -> tuple[int, str]:
    """The largest unit in which the largest budget is at least 1."""
    largest = max(budgets_bytes, default=0)
    return next(
        ((size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if largest >= size), (1, "B")
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
