"""The wires: a bridge in a network namespace of its own, and a shaped cable from there to every node.

Nothing here has a name outside these namespaces: when their processes end, the kernel removes all of it.
"""

import dataclasses
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from . import processes
from .errors import TestBedError
from .processes import command

SUBNET = "10.77.0"
INTERFACE = "eth0"  # of every node
_BRIDGE = "bridge"
_BURST_BYTES = 64 * 1024  # what passes at once after a pause: small beside any collective worth measuring
_QUEUE = "100ms"
_MTU = 9000  # bytes, as on a cluster's own network; small packets cost a shared core more than they teach
# Whatever the host does for the internet: no pauses to probe a path, no slow start after every pause to compute, and
# nothing that one connection leaves to the next.
_SYSCTLS = ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0", "tcp_no_metrics_save=1")


def address_of(index: int) -> str:
    """The IP address of a node."""
    return f"{SUBNET}.{index + 1}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a node's interface has received and sent since it came up, frames included."""

    received_bytes: int
    sent_bytes: int

    def since(self, earlier: "Traffic") -> "Traffic":
        """What came on top of an earlier reading."""
        return Traffic(
            received_bytes=self.received_bytes - earlier.received_bytes,
            sent_bytes=self.sent_bytes - earlier.sent_bytes,
        )


class Switch:
    """The bridge, held by one sleeping process; `end` removes it and with it every cable."""

    def __init__(self) -> None:
        words = ["unshare", "--net", "sleep", "infinity"]
        self._process: subprocess.Popen[Any] = processes.start(words, stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        try:
            _wait_for_own_network(self.pid)
            self._inside("ip", "link", "add", "name", _BRIDGE, "mtu", str(_MTU), "type", "bridge")
            self._inside("ip", "link", "set", _BRIDGE, "up")
        except BaseException:
            self.end()
            raise

    def connect(self, pid: int, index: int) -> None:
        """Lays a cable to the network namespace of a process, which gets the address of node `index`."""
        _wait_for_own_network(pid)
        port = f"node{index}"
        self._inside("ip", "link", "del", port, check=False)  # of a node that was here before
        mtu = ["mtu", str(_MTU)]
        cable = ["ip", "link", "add", "name", port, *mtu, "type", "veth", "peer", "name", INTERFACE, *mtu]
        self._inside(*cable, "netns", str(pid))
        self._inside("ip", "link", "set", port, "master", _BRIDGE, "up")
        in_node(pid, "ip", "link", "set", "lo", "up")
        in_node(pid, "ip", "addr", "add", f"{address_of(index)}/24", "dev", INTERFACE)
        in_node(pid, "ip", "link", "set", INTERFACE, "up")
        in_node(pid, "sysctl", "--quiet", "--write", *(f"net.ipv4.{setting}" for setting in _SYSCTLS))
        for namespace, device in ((self.pid, port), (pid, INTERFACE)):
            _keep_order(namespace, device)

    def set_up(self, index: int, *, is_up: bool) -> None:
        """Plugs a node's cable in, or pulls it."""
        self._inside("ip", "link", "set", f"node{index}", "up" if is_up else "down")

    def end(self) -> None:
        processes.end(self._process)

    def _inside(self, *words: str, check: bool = True) -> str:
        return in_node(self.pid, *words, check=check)


def in_node(pid: int, *words: str, check: bool = True) -> str:
    """Runs a command in the network namespace of a process."""
    return command("nsenter", "--target", str(pid), "--net", *words, check=check)


def _keep_order(pid: int, device: str) -> None:
    """Has each connection's packets taken by one core, as an adapter's queues do it.

    A virtual cable's are taken by whichever core shaped them, in no order, which TCP takes for losses.
    """
    cores = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
    script = f"mount -t sysfs sysfs /sys && echo {cores} > /sys/class/net/{device}/queues/rx-0/rps_cpus"
    in_node(pid, "unshare", "--mount", "sh", "-c", script)


def shape(switch_pid: int, pid: int, index: int, mbit: float | None) -> None:
    """Bounds what a node sends and what it receives, each to `mbit` megabits a second; None takes the bounds away."""
    for namespace, device in ((switch_pid, f"node{index}"), (pid, INTERFACE)):
        if mbit is None:
            in_node(namespace, "tc", "qdisc", "del", "dev", device, "root", check=False)
            continue
        bucket = ["tbf", "rate", f"{round(mbit * 1000)}kbit", "burst", str(_BURST_BYTES), "latency", _QUEUE]
        in_node(namespace, "tc", "qdisc", "replace", "dev", device, "root", *bucket)


def cut(pid: int, address: str) -> None:
    """What a node sends to this address is lost, as by a firewall between the two."""
    in_node(pid, "ip", "route", "add", "blackhole", f"{address}/32")


def mend(pid: int, address: str) -> None:
    """Takes back a `cut`."""
    in_node(pid, "ip", "route", "del", "blackhole", f"{address}/32")


def traffic_of(pid: int) -> Traffic:
    """What has passed a node's interface."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            fields = counters.split()
            return Traffic(received_bytes=int(fields[0]), sent_bytes=int(fields[8]))
    return Traffic(received_bytes=0, sent_bytes=0)


def _wait_for_own_network(pid: int) -> None:
    """Until a process that was just started has left our network namespace."""
    own, deadline_s = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            if os.readlink(f"/proc/{pid}/ns/net") != own:
                return
        except OSError:
            break
        time.sleep(0.01)
    raise TestBedError(f"process {pid} got no network namespace", "See whether root may 'unshare --net' here.")
