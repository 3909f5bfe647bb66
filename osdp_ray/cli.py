"""The command line: osdp discover | profile | plan | explain | diff | train | export.

Every verb reads the earlier one's file. Records go to `--out`, tables (or JSON with `--json`) to standard output,
progress and errors to standard error. What a user can mend is one line and exit code 2; a run stopped by a signal exits
with 128 + its number.
"""

import argparse
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from osdp_ray.cli_flags import add_train_flags, build_parser
from osdp_ray.errors import Interrupted, OsdpError, UsageError
from osdp_ray.signals import StopSignals
from osdp_ray.units import format_bytes

__all__ = ["add_train_flags", "guarded", "main", "train"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit code."""
    return guarded(lambda: _dispatch(build_parser().parse_args(arguments)))


def guarded(work: Callable[[], int]) -> int:
    """Runs a front end's work: OsdpErrors become a line on standard error and an exit code. Jobs use it too."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    with StopSignals() as signals:
        try:
            return work()
        except Interrupted as error:
            return _stopped(error)
        except OsdpError as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        except KeyboardInterrupt:
            return _stopped(Interrupted(int(signals.received or signal.SIGINT), 0, ""))
        except BrokenPipeError:  # the reader of our output has gone, as `| head` does
            sys.stderr.close()
            return 141


def _stopped(error: Interrupted) -> int:
    sys.stderr.write(f"{error}\n")
    return 128 + error.signal_number


def _dispatch(options: argparse.Namespace) -> int:
    verbs = {
        "discover": _discover,
        "profile": _profile,
        "plan": _plan,
        "explain": _explain,
        "diff": _diff,
        "train": _train,
        "export": _export,
    }
    return verbs[options.verb](options)


def _discover(options: argparse.Namespace) -> int:
    _show(_with_ray(options, lambda cluster: cluster), options)
    return 0


def _profile(options: argparse.Namespace) -> int:
    if options.cluster is not None:
        _show(_estimate(options), options)
        return 0
    workload = _workload(options)

    def measure(cluster: Any) -> Any:
        from osdp_ray.profiling import profile

        return profile(workload, cluster)

    _show(_with_ray(options, measure), options)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from osdp_ray.planning import plan

    profile = _read_profile(options) if options.cluster is None else _estimate(options)
    budget_bytes = options.memory_budget
    if budget_bytes is None:
        budget_bytes = profile.device_memory_bytes * 9 // 10
    _show(
        plan(
            profile,
            budget_bytes=budget_bytes,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            prefetch=options.prefetch,
            scatter_group=options.scatter_group,
        ),
        options,
    )
    return 0


def _read_profile(options: argparse.Namespace) -> Any:
    if options.settings or options.precision or options.measure:
        word = options.settings[0] if options.settings else "--precision" if options.precision else "--measure"
        raise UsageError(
            f"{word} belongs to a workload, and {options.workload} is read as a profile. "
            "Name a workload and give --cluster, or give 'osdp profile' the workload first."
        )
    return _load_profile(options.workload, "Name a workload and give --cluster, or make it by")


def _load_profile(path: str, remedy: str = "Make it by") -> Any:
    from osdp_ray.records.profile import Profile

    if not Path(path).exists():
        raise UsageError(f"there is no profile {path!r}. {remedy} 'osdp profile WORKLOAD --out {_json_name(path)}'.")
    return Profile.load(path)


def _json_name(path: str) -> str:
    return path if path.endswith(".json") else "profile.json"


def _estimate(options: argparse.Namespace) -> Any:
    """The profile of a workload on the hardware of `--cluster`, worked out here."""
    from osdp_ray.catalogue import load_hardware

    for flag in ("num_workers", "address"):
        if getattr(options, flag, None) is not None:
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{name} is of a cluster that runs, and --cluster of one that does not. Leave one out.")
    hardware = load_hardware(options.cluster)
    if len({device.memory_bytes for device in hardware.devices}) > 1:
        smallest = min(hardware.devices, key=lambda device: device.memory_bytes)
        sys.stderr.write(
            f"note: devices differ, and a plan is the same on all: the {format_bytes(smallest.memory_bytes)} of "
            f"{smallest.name} rule\n"
        )
    workload = _workload(options)
    from osdp_ray.profiling import estimate

    return estimate(workload, hardware)


def _explain(options: argparse.Namespace) -> int:
    from osdp_ray.records.plan import Plan

    if not Path(options.plan).exists():
        raise UsageError(
            f"there is no plan {options.plan!r}. Make it by 'osdp plan profile.json --out {options.plan}'."
        )
    plan = Plan.load(options.plan)
    if options.profile is None:
        if options.memory:
            raise UsageError("--memory plays the plan's step again. Give --profile the profile that it was made from.")
        _write(json.dumps(plan.to_json(), indent=1) if options.json else _told_by(plan))
        return 0
    profile = _load_profile(options.profile)
    plan.require_profile(profile)
    if options.memory:
        from osdp_ray.costs import explain_peaks, peak_table

        peaks = explain_peaks(profile, plan)
        values = [dataclasses.asdict(peak) for peak in peaks]
        _write(json.dumps(values, indent=1) if options.json else peak_table(peaks, plan.budget_bytes))
        return 0
    from osdp_ray.planning.explain import explain
    from osdp_ray.planning.explain_table import explanation_table

    explanation = explain(profile, plan)
    values = dataclasses.asdict(explanation)
    _write(json.dumps(values, indent=1) if options.json else explanation_table(plan, explanation))
    return 0


def _told_by(plan: Any) -> str:
    """A plan's table with what was proven of it."""
    from osdp_ray.planning.explain_table import proof_line

    phases = plan.prediction.peak_by_phase
    highest = max(phases, key=lambda phase: phases[phase])
    hint = "Give --profile the profile that it was made from for the reason of every decision."
    return f"{plan.table()}\n\nthe {highest} phase is the highest\n{proof_line(plan)}\n{hint}"


def _diff(options: argparse.Namespace) -> int:
    from osdp_ray.planning.difference import difference_table, differences
    from osdp_ray.records.plan import Plan

    found = differences(Plan.load(options.first), Plan.load(options.second))
    _write(json.dumps(list(map(dataclasses.asdict, found)), indent=1) if options.json else difference_table(found))
    return 0


def _train(options: argparse.Namespace) -> int:
    summary = train(_workload(options), options, quiet=options.json)
    if options.json:
        _write(json.dumps(summary.to_json(), indent=1))
    return 0


def train(workload: Any, options: argparse.Namespace, *, quiet: bool = False) -> Any:
    """Runs the pipeline with the flags of `add_train_flags`, shown in the terminal unless quiet; the Summary."""
    from osdp_ray.pipeline import run
    from osdp_ray.reporting.console import Console

    console = Console(out=sys.stdout, err=sys.stderr, num_steps=options.steps, run_dir=options.out)
    try:
        return run(
            workload,
            num_workers=options.num_workers,
            budget_bytes=options.memory_budget,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            prefetch=options.prefetch,
            scatter_group=options.scatter_group,
            num_steps=options.steps,
            out=options.out,
            seed=options.seed,
            save_every=options.save_every,
            compiles=options.compile,
            saves_kept=options.keep_saves,
            async_saves=options.async_saves,
            saves_to=options.saves_to,
            init_from=options.init_from,
            init_partly=options.init_partly,
            resume=options.resume,
            address=options.address,
            max_replans=options.max_replans,
            on_event=None if quiet else console,
        )
    finally:
        console.close()


def _export(options: argparse.Namespace) -> int:
    from osdp_ray.execution import export

    for path in export(options.save, options.out, max_file_bytes=options.max_file_size, dtype=options.dtype):
        _write(str(path))
    return 0


def _workload(options: argparse.Namespace) -> Any:
    from osdp_ray.workload import load_workload

    settings = {}
    for word in options.settings:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"{word!r} is no argument of a workload. Write key=value, such as layers=8.")
        settings[key] = value
    sys.path.insert(0, "")  # a workload of the user's lies where they stand
    workload = load_workload(options.workload, settings)
    workload.precision = options.precision or workload.precision
    workload.measure = workload.measure or options.measure
    return workload


def _with_ray(options: argparse.Namespace, work: Callable[[Any], Any]) -> Any:
    """`work` on the cluster; a Ray that was started for it is shut down afterwards."""
    import ray

    from osdp_ray.discovery import connect, discover

    started = not ray.is_initialized()
    connect(options.address, num_workers=options.num_workers)
    try:
        return work(discover(num_workers=options.num_workers))
    finally:
        if started:
            ray.shutdown()


def _show(record: Any, options: argparse.Namespace) -> None:
    if options.out is not None:
        try:
            record.save(options.out)
        except OSError as error:
            raise UsageError(f"{options.out} cannot be written ({error}). Give --out the path of a file.") from None
    _write(json.dumps(record.to_json(), indent=1) if options.json else record.table())


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
