"""Processes that end with their owner: each is started under `setpriv --pdeathsig KILL`, so the kernel ends it when the
process that started it ends in whatever way, and everything in a node's process namespace with its first process.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import TestBedError

DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# iproute2 lies in sbin, which is not on every user's path.
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def command(*words: str, check: bool = True) -> str:
    """Runs a short command and returns what it prints. Raises TestBedError with what it said where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": PATH})
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise TestBedError(
            f"'{' '.join(words)}' failed with {done.returncode}: {said[0] if said else 'it said nothing'}",
            "See whether root may do that here (containers often may not), and whether the kernel has what it needs.",
        )
    return done.stdout


def start(words: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
    """Starts a process that ends with this one, in a session of its own: Ctrl-C reaches the owner alone."""
    return subprocess.Popen([*DIES_WITH_PARENT, *words], start_new_session=True, **settings)


def first_child(pid: int, timeout_s: float = 10.0) -> int:
    """The first child of a process, as soon as it has one."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                return int(children[0])
        time.sleep(0.02)
    raise TestBedError(
        f"process {pid} started no namespace within {timeout_s:.0f} s", "See whether 'unshare --net true' works."
    )


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process of ours at once and waits for it."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


def start_ticks(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None where it is gone. With the pid it names one process ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def members(pid: int) -> list[int]:
    """All processes in the process namespace that `pid` is in."""
    wanted = os.readlink(f"/proc/{pid}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "pid") == wanted:
                    found.append(int(entry.name))
    return found


def signal_members(pid: int, number: signal.Signals) -> None:
    """Sends a signal to every process of a process namespace."""
    for member in members(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, number)
