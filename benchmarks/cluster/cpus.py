"""How much of the machine's cores a node may use: which ones, and what part of their time."""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from . import processes
from .errors import TestBedError

PREFIX = "osdp-"
# As short as the kernel allows, so that a bounded node is evenly slow and not now fast, now stopped.
_LEAST_PERIOD_US, _LEAST_QUOTA_US = 4_000, 1_000
ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2


def split_cores(num_nodes: int) -> list[list[int]]:
    """Cores of each node: equal parts of their own where there are enough, else one each in turn."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_nodes
    if share:
        return [cores[index * share : (index + 1) * share] for index in range(num_nodes)]
    return [[cores[index % len(cores)]] for index in range(num_nodes)]


def make_group(name: str) -> Path | None:
    """A control group for one node, None where this system lets us make none."""
    for root in ROOTS:
        group = root / f"{PREFIX}{name}"
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            if any((group / file).exists() for file in ("cpu.cfs_quota_us", "cpu.max")):
                return group
            group.rmdir()
    return None


def remove_group(group: Path | None, *, wait_s: float = 5.0) -> None:
    """Removes a group as soon as its processes have gone, which takes a moment after they were killed."""
    deadline_s = time.monotonic() + wait_s
    while group is not None and group.exists():
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        if time.monotonic() >= deadline_s:
            return
        time.sleep(0.02)


def remove_groups_without_bed(names: Iterable[str]) -> None:
    """Removes what groups are left of beds, those of `names` apart. One whose processes do not end stays."""
    kept = set(names)
    for group in (group for root in ROOTS for group in root.glob(f"{PREFIX}*-*")):
        if group.name.removeprefix(PREFIX).rpartition("-")[0] not in kept:
            remove_group(group)


def limit_cpus(group: Path | None, cpus: float | None) -> None:
    """Bounds what a group's processes use together, in cores (0.5: half of one); None lifts the bound."""
    if group is None:
        raise TestBedError(
            "no control group of the processor can be made here",
            "Mount the cpu controller below /sys/fs/cgroup, or give the node fewer cores instead.",
        )
    if cpus is not None and cpus <= 0:
        raise TestBedError(f"a node cannot run on {cpus} cores", "Give a number above 0.")
    period_us = max(_LEAST_PERIOD_US, round(_LEAST_QUOTA_US / cpus)) if cpus else _LEAST_PERIOD_US
    quota_us = None if cpus is None else round(cpus * period_us)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
        return
    (group / "cpu.cfs_period_us").write_text(str(period_us))
    (group / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))


def set_cores(pid: int, cores: Iterable[int]) -> None:
    """Moves every thread of a node, now and later ones, to these cores."""
    wanted = set(cores)
    for member in processes.members(pid):
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{member}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), wanted)
