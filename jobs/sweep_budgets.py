"""What memory buys: plans a byte-level GPT for several budgets, `python jobs/sweep_budgets.py --budgets 12MiB,24MiB`.

With --measure-steps every plan is also run, through Ray Tune. --out gets a table as JSON and Parquet, and a PNG.
Runs on a Ray of its own, on a cluster with --address, and under `ray job submit -- python jobs/sweep_budgets.py ...`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from osdp_ray.cli import guarded
from osdp_ray.errors import UsageError
from osdp_ray.units import format_bytes, format_seconds, parse_bytes

_MODEL_FLAGS = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "seq": "sequence",
    "data": "data",
    "lr": "learning_rate",
}


def build_parser() -> argparse.ArgumentParser:
    """The job's flags. Those of the model are absent from the options where they are not given."""
    parser = argparse.ArgumentParser(description="What memory buys: plan, and measure, for several budgets.")
    model = parser.add_argument_group("model", argument_default=argparse.SUPPRESS)
    model.add_argument("--data", help="a file, a folder or Parquet; default: Python's own source")
    model.add_argument("--layers", type=int, help="default: 4")
    model.add_argument("--hidden", type=int, help="default: 128")
    model.add_argument("--heads", type=int, help="default: 4")
    model.add_argument("--seq", type=int, help="bytes per sample (default: 128)")
    model.add_argument("--lr", type=float, help="peak learning rate (default: 0.001)")
    parser.add_argument("--budgets", metavar="SIZE,SIZE,...", help="per device, such as 16MiB,24MiB")
    parser.add_argument("--from", dest="lowest", metavar="SIZE", help="instead of --budgets: the lowest of --points")
    parser.add_argument("--to", dest="highest", metavar="SIZE", help="the highest of --points")
    parser.add_argument("--points", type=int, help="how many budgets, evenly spaced (default: 8)")
    parser.add_argument("--global-batch", type=int, help="samples per step; default: one micro-batch per worker")
    parser.add_argument("--micro-batch", type=int, help="samples per worker and pass; default: each plan's choice")
    parser.add_argument("--profile", metavar="FILE", help="plan from this profile.json; nothing is measured")
    parser.add_argument("--measure-steps", type=int, default=0, help="run every plan for so many steps (default: 0)")
    parser.add_argument("--num-workers", type=int, help="one per device (default: 2, or those of --profile)")
    parser.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, else a Ray of its own")
    parser.add_argument("--out", type=Path, help="folder for sweep.json, sweep.parquet and sweep.png")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Sweeps and prints the table. Exit code 1 where a plan was to be measured and failed."""
    options = build_parser().parse_args(argv)
    return guarded(lambda: _sweep(options))


def _sweep(options: argparse.Namespace) -> int:
    from osdp_ray.reporting.sweep import plot, require_matplotlib
    from osdp_ray.tune import sweep

    budgets_bytes = _budgets(options)
    if options.out is not None:
        require_matplotlib()
    subject, num_workers = _subject(options)
    result = sweep(
        subject,
        budgets_bytes,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        measure_steps=options.measure_steps,
        num_workers=num_workers,
        address=options.address,
        out=options.out,
        on_event=_show,
    )
    print(result.table())
    if options.out is not None:
        plot(result, options.out / "sweep.png")
        print(f"\nwritten: {options.out}/sweep.json, sweep.parquet, sweep.png")
    return 1 if any(row.measured_problem for row in result.rows) else 0


def _subject(options: argparse.Namespace) -> tuple[Any, int | None]:
    """The profile or the workload to sweep, and how many workers it runs on."""
    given = {argument: getattr(options, flag) for flag, argument in _MODEL_FLAGS.items() if hasattr(options, flag)}
    if options.profile is None:
        from osdp_ray.workloads.gpt import gpt

        return gpt(**given), 2 if options.num_workers is None else options.num_workers
    from osdp_ray.records.profile import Profile

    if given:
        flags = ", ".join(f"--{flag}" for flag, argument in _MODEL_FLAGS.items() if argument in given)
        raise UsageError(f"--profile is of a model already, and {flags} describes another. Leave one of them out.")
    return Profile.load(options.profile), options.num_workers


def _budgets(options: argparse.Namespace) -> list[int]:
    """The budgets in bytes, from the list or from the range."""
    ends = (options.lowest, options.highest)
    if options.budgets is not None:
        if ends != (None, None) or options.points is not None:
            raise UsageError("--budgets is a list, and --from, --to and --points make another. Leave one of them out.")
        return [_size("--budgets", text) for text in options.budgets.split(",") if text.strip()]
    if None in ends:
        raise UsageError(
            "no budgets are given. Use --budgets 16MiB,24MiB,32MiB, or --from 16MiB --to 64MiB --points 8."
        )
    lowest_bytes, highest_bytes = _size("--from", options.lowest), _size("--to", options.highest)
    points = 8 if options.points is None else options.points
    if lowest_bytes >= highest_bytes:
        raise UsageError(
            f"--from is {format_bytes(lowest_bytes)} and --to {format_bytes(highest_bytes)}: there is nothing between. "
            "Give --to a larger size than --from."
        )
    if points < 2:
        raise UsageError(f"--points is {points}, and at least 2 are needed: --from and --to.")
    step_bytes = (highest_bytes - lowest_bytes) / (points - 1)
    return [lowest_bytes + round(index * step_bytes) for index in range(points)]


def _size(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}.") from error


def _show(kind: str, facts: dict[str, Any]) -> None:
    """Progress on standard error."""
    text = None
    if kind == "stage" and facts["seconds"] is not None:
        text = f"{facts['name']}: {format_seconds(facts['seconds'])}"
    elif kind == "row" and not facts["row"].is_measured:
        row = facts["row"]
        outcome = f"{row.predicted_samples_per_s:.1f} samples/s predicted" if row.fits else "does not fit"
        text = f"  {format_bytes(row.budget_bytes)}: {outcome}"
    elif kind == "trial":
        text = f"  {format_bytes(facts['budget_bytes'])}: training ..."
    elif kind == "row" and facts["row"].measured_samples_per_s is not None:
        row = facts["row"]
        text = f"  {format_bytes(row.budget_bytes)}: {row.measured_samples_per_s:.1f} samples/s measured"
    if text is not None:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
