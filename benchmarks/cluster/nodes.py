"""One node: a process in namespaces of its own that runs `ray start`, and the way into it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import processes
from .errors import TestBedError
from .network import INTERFACE, address_of

PORT = 6379
_SHARED_MEMORY_SPARE_BYTES = 64 << 20
ROOT = Path(__file__).resolve().parents[2]
_OWN_NAMESPACES = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
RAY = Path(sys.executable).parent / "ray"

# Every node sees the whole machine's memory, and none may kill workers for what the others use. Workers run as
# everything else does, not at nice 15.
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks"))),
}


class Node:
    """A node that runs. `pid` is the first process of its namespaces, as seen from outside."""

    def __init__(
        self,
        index: int,
        *,
        folder: Path,
        cores: Sequence[int],
        num_slots: int,
        memory_bytes: int,
        store_bytes: int,
        group: Path | None,
        env: Mapping[str, str],
    ) -> None:
        self.index, self.address, self.group, self.cores = index, address_of(index), group, list(cores)
        self.folder = folder
        self.env = {
            **os.environ,
            **SETTINGS,
            "PATH": processes.PATH,
            "RAY_ADDRESS": f"{address_of(0)}:{PORT}",
            **env,
        }
        ray = [str(RAY), "start", "--block", f"--node-ip-address={self.address}", f"--num-cpus={num_slots}"]
        ray += [f"--object-store-memory={store_bytes}", f"--memory={memory_bytes}", "--log-color=false"]
        if index == 0:
            ray += ["--head", f"--port={PORT}", "--include-dashboard=false"]
        else:
            ray += [f"--address={address_of(0)}:{PORT}"]
        (folder / "ray").mkdir(parents=True, exist_ok=True)
        setup = [
            f"hostname node{index}",
            "mkdir -p /tmp/ray",
            f"mount --bind {shlex.quote(str(folder / 'ray'))} /tmp/ray",
            f"mount -t tmpfs -o size={store_bytes + _SHARED_MEMORY_SPARE_BYTES} tmpfs /dev/shm",
            # All nodes by name, and no name server: one that cannot be reached stalls every connection for seconds.
            f"mount --bind {shlex.quote(str(folder.parent / 'hosts'))} /etc/hosts",
            f"mount --bind {shlex.quote(str(folder.parent / 'resolv.conf'))} /etc/resolv.conf",
            f"until ip -brief addr show {INTERFACE} 2>/dev/null | grep -q {self.address}; do sleep 0.05; done",
            f"exec {shlex.join(ray)}",
        ]
        with open(folder / "ray-start.log", "wb") as log:
            self._process = processes.start(
                confined(
                    self.group,
                    self.cores,
                    [*_OWN_NAMESPACES, "sh", "-e", "-c", "; ".join(setup)],
                ),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.pid = processes.first_child(self._process.pid)
        except BaseException:
            processes.end(self._process)
            raise

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """What `ray start` has said."""
        return (self.folder / "ray-start.log").read_text(errors="replace")

    def require_running(self) -> None:
        if not self.is_running:
            last = [line for line in self.log.splitlines() if line.strip()][-3:]
            raise TestBedError(
                f"node {self.index} has ended with {self._process.poll()}: {' | '.join(last) or 'it said nothing'}",
                f"Its log is {self.folder / 'ray-start.log'}.",
            )

    def popen(
        self, words: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None, **settings: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command inside the node: its network, files, names, processes, cores."""
        self.require_running()
        inside = entering(self.pid, self.group, self.cores, [*processes.DIES_WITH_PARENT, *words], cwd=cwd)
        return processes.start(inside, env={**self.env, **(env or {})}, **settings)

    def end(self) -> None:
        """Takes the node away as a power cut would: every process of it at once."""
        processes.end(self._process)


def confined(group: Path | None, cores: Sequence[int], words: Sequence[str]) -> list[str]:
    """A command on these cores and in this control group; `exec` keeps the process's number."""
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *words]
    if group is None:
        return pinned
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *pinned]


def entering(
    pid: int, group: Path | None, cores: Sequence[int], words: Sequence[str], *, cwd: str | None = None
) -> list[str]:
    """A command inside the namespaces of a node."""
    inside = ["nsenter", "--target", str(pid), "--net", "--mount", "--uts", "--pid"]
    return confined(group, cores, [*inside, "sh", "-c", 'cd "$0" && exec "$@"', cwd or os.getcwd(), *words])
