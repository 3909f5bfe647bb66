"""The test bed: a switch, its nodes, what of them can be changed while they run, and what is left of beds that died.

A bed ends with the process that brought it up, however that ends: the kernel then ends every process of it, and with
the last one its network. What stays is a folder and empty control groups; the next bed removes those of dead owners.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from . import cpus, network, processes
from .errors import TestBedError
from .network import Switch, Traffic
from .nodes import PORT, Node

FOLDER = Path(os.environ.get("OSDP_TESTBED_DIR", Path(tempfile.gettempdir()) / "osdp-testbed"))
STATE = "state.json"
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset")
_START_TIMEOUT_S = 120.0
_WAIT_FOR_NODES = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
deadline = time.monotonic() + float(sys.argv[3])
while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]):
    if time.monotonic() > deadline:
        sys.exit(f"Ray lists {sum(node['Alive'] for node in ray.nodes())} nodes, and {sys.argv[2]} run")
    time.sleep(0.2)
"""


def missing_requirement() -> str | None:
    """Why no test bed can be made here, None where one can."""
    if sys.platform != "linux":
        return "the test bed needs Linux namespaces"
    if os.geteuid() != 0:
        return "the test bed needs root (network namespaces)"
    for program in _PROGRAMS:
        if shutil.which(program, path=processes.PATH) is None:
            return f"the test bed needs {program!r} (Debian: apt-get install iproute2 util-linux)"
    probe = (
        "ip link add name probe0 type veth peer name probe1 && "
        "tc qdisc add dev probe0 root tbf rate 1mbit burst 64k latency 10ms"
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c", probe],
        env={**os.environ, "PATH": processes.PATH},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return f"this kernel or container makes no shaped links ({said[0] if said else done.returncode})"
    return None


class TestBed:
    """A context manager; see the package's docstring. Node 0 is Ray's head. Every change takes effect at once.

    `cores` are the processor cores of each node, by default equal parts; `link_mbit` is the speed of every cable in
    either direction, None unbounded. Raises TestBedError where it cannot come up, with nothing left behind.
    """

    __test__ = False  # no class of tests, whatever its name begins with

    def __init__(
        self,
        *,
        num_nodes: int = 2,
        slots_per_node: int = 2,
        link_mbit: float | None = 400.0,
        cores: Sequence[Sequence[int]] | None = None,
        memory_bytes: int = 4 << 30,
        store_bytes: int = 100 << 20,
        env: Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        self.num_nodes, self.slots_per_node, self.link_mbit = num_nodes, slots_per_node, link_mbit
        self.cores = [list(part) for part in (cores or cpus.split_cores(num_nodes))]
        self.memory_bytes, self.store_bytes, self.env = memory_bytes, store_bytes, dict(env or {})
        self.name = name or f"bed-{os.getpid()}"
        self.folder = FOLDER / self.name
        self.address = f"{network.address_of(0)}:{PORT}"
        self._nodes: dict[int, Node] = {}
        self._switch: Switch | None = None

    def __enter__(self) -> Self:
        if (reason := missing_requirement()) is not None:
            raise TestBedError(reason, "Run this as root on a Linux machine that has them.")
        remove_leftovers()
        if self.folder.exists():
            raise TestBedError(
                f"a test bed {self.name!r} is up already",
                f"Take it down: python -m benchmarks.cluster --name {self.name} down",
            )
        try:
            self._start()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> None:
        """Ends every node and removes every trace; again and again is fine."""
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.end()
        if self._switch is not None:
            self._switch.end()
            self._switch = None
        for node in nodes:
            cpus.remove_group(node.group)
        shutil.rmtree(self.folder, ignore_errors=True)

    def node(self, index: int) -> Node:
        """A node that was started. Raises TestBedError where there is none of that number."""
        if index not in self._nodes:
            raise TestBedError(
                f"the test bed has no node {index}", f"It has {', '.join(map(str, sorted(self._nodes)))}."
            )
        return self._nodes[index]

    def run(
        self, index: int, words: Sequence[str], *, timeout_s: float = 300.0, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside a node and returns what it printed. A command over its time is ended."""
        process = self.node(index).popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
        )
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            processes.end(process)
            raise
        return subprocess.CompletedProcess(list(words), process.returncode, out, errors)

    def shape(self, mbit: float | None, index: int | None = None) -> None:
        """Changes the speed of a node's cable, of all without an index; traffic under way goes on at the new one."""
        for number in sorted(self._nodes) if index is None else [index]:
            network.shape(self._require_switch().pid, self.node(number).pid, number, mbit)

    def pull_cable(self, index: int, *, is_out: bool = True) -> None:
        """Unplugs a node, or plugs it in again."""
        self._require_switch().set_up(index, is_up=not is_out)

    def cut(self, one: int, other: int) -> None:
        """What one node sends to another is lost, and so no connection between the two comes about."""
        network.cut(self.node(one).pid, network.address_of(other))

    def mend(self, one: int, other: int) -> None:
        network.mend(self.node(one).pid, network.address_of(other))

    def limit_cpus(self, index: int, cores: float | None) -> None:
        """Bounds the processor time of a node, in cores; None lifts the bound."""
        cpus.limit_cpus(self.node(index).group, cores)

    def set_cores(self, index: int, cores: Sequence[int]) -> None:
        """Moves a node to other cores."""
        node = self.node(index)
        node.cores = list(cores)
        cpus.set_cores(node.pid, cores)

    def freeze(self, index: int, *, is_frozen: bool = True) -> None:
        """Stops every process of a node: it neither answers nor ends. Or lets them go on."""
        processes.signal_members(self.node(index).pid, signal.SIGSTOP if is_frozen else signal.SIGCONT)

    def kill_node(self, index: int) -> None:
        """Takes a node away as a power cut would; `start_node` brings a new one in its place."""
        self.node(index).end()

    def start_node(self, index: int, *, env: Mapping[str, str] | None = None) -> None:
        """Starts a node anew, or one more, and waits until Ray knows it, and that the one before it is gone."""
        if index in self._nodes and self._nodes[index].is_running:
            raise TestBedError(f"node {index} runs", "Kill it first, or give another number.")
        # Ray takes a killed node for alive until some heartbeats are missed; its place would be counted twice.
        self._wait_for(sum(node.is_running for node in self._nodes.values()))
        self._start_node(index, env or {})
        self._wait_for(sum(node.is_running for node in self._nodes.values()))
        self._write_state(is_ready=True)

    def traffic(self, index: int) -> Traffic:
        """Bytes that have passed a node's cable since it came up."""
        return network.traffic_of(self.node(index).pid)

    def _start(self) -> None:
        self.folder.mkdir(parents=True)
        self._write_state(is_ready=False)
        names = [f"{network.address_of(index)} node{index}" for index in range(self.num_nodes + 4)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self._switch = Switch()
        for index in range(self.num_nodes):
            self._start_node(index, {})
            if index == 0:
                self._wait_for_port()
        self._wait_for(self.num_nodes)
        self._write_state(is_ready=True)

    def _start_node(self, index: int, env: Mapping[str, str]) -> None:
        node = Node(
            index,
            folder=self.folder / f"node{index}",
            cores=self.cores[index % len(self.cores)],
            num_slots=self.slots_per_node,
            memory_bytes=self.memory_bytes,
            store_bytes=self.store_bytes,
            group=cpus.make_group(f"{self.name}-{index}"),
            env={**self.env, **env},
        )
        self._nodes[index] = node
        self._require_switch().connect(node.pid, index)
        network.shape(self._require_switch().pid, node.pid, index, self.link_mbit)
        self._write_state(is_ready=False)

    def _wait_for_port(self) -> None:
        """Until the head listens: the other nodes do not wait long for it."""
        head, deadline_s = self.node(0), time.monotonic() + _START_TIMEOUT_S
        listening = ["ss", "-Htln", f"sport = :{PORT}"]
        while not network.in_node(head.pid, *listening, check=False).strip():
            head.require_running()
            if time.monotonic() > deadline_s:
                raise TestBedError(
                    f"Ray's head did not listen within {_START_TIMEOUT_S:.0f} s", f"Its log is in {head.folder}."
                )
            time.sleep(0.1)

    def _wait_for(self, num_nodes: int) -> None:
        words = [sys.executable, "-c", _WAIT_FOR_NODES, self.address, str(num_nodes), str(_START_TIMEOUT_S)]
        done = self.run(0, words, timeout_s=_START_TIMEOUT_S + 60)
        if done.returncode != 0:
            for node in self._nodes.values():
                node.require_running()
            said = done.stderr.strip().splitlines()
            raise TestBedError(
                f"Ray's nodes did not come together: {said[-1] if said else done.returncode}",
                f"The logs of the nodes are in {self.folder}.",
            )

    def _require_switch(self) -> Switch:
        if self._switch is None:
            raise TestBedError("the test bed is down", "Use it within its 'with' block.")
        return self._switch

    def _write_state(self, *, is_ready: bool) -> None:
        state = {
            "owner": os.getpid(),
            "owner_start_ticks": processes.start_ticks(os.getpid()),
            "is_ready": is_ready,
            "switch": self._switch.pid if self._switch else 0,
            "nodes": {
                str(index): {"pid": node.pid, "group": str(node.group or ""), "cores": node.cores}
                for index, node in self._nodes.items()
            },
        }
        temporary = self.folder / f"{STATE}.new"
        temporary.write_text(json.dumps(state))
        temporary.replace(self.folder / STATE)


def read_state(name: str) -> dict[str, Any] | None:
    """What a bed wrote about itself, None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((FOLDER / name / STATE).read_text())
    return None


def is_owned(state: dict[str, Any]) -> bool:
    """Whether the process that brought a bed up still runs."""
    return processes.start_ticks(state["owner"]) == state["owner_start_ticks"]


def remove_leftovers() -> list[str]:
    """Removes what is left of beds whose owner has died; their names."""
    removed = []
    for folder in sorted(FOLDER.glob("*/")):
        state = read_state(folder.name)
        if state is not None and is_owned(state):
            continue
        if state is None and time.time() - folder.stat().st_mtime < 60:
            continue  # one that is just being made
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
    cpus.remove_groups_without_bed(folder.name for folder in FOLDER.glob("*/"))
    return removed
