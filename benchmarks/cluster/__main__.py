"""The test bed from a shell: `python -m benchmarks.cluster up`, `run 0 -- python driver.py`, `down`.

`up` leaves a process in the background that owns the bed; `down` ends it. A bed whose owner was killed is gone at
once, and what is left of it is removed by the next command.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from . import cpus, network, processes
from .errors import TestBedError
from .network import address_of
from .nodes import PORT, ROOT, SETTINGS, entering
from .testbed import FOLDER, TestBed, is_owned, read_state, remove_leftovers

_UP_TIMEOUT_S = 180.0


def main() -> int:
    words = sys.argv[1:]
    inside: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, inside = words[:cut], words[cut + 1 :]
    flags = _parser().parse_args(words)
    try:
        remove_leftovers()
        return _VERBS[flags.verb](flags, inside) or 0
    except TestBedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--name", default="bed", help="several beds may be up side by side")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("up", "hold"):
        up = verbs.add_parser(verb)
        up.add_argument("--nodes", type=int, default=2)
        up.add_argument("--slots", type=int, default=2, help="CPU slots of a node")
        up.add_argument("--mbit", type=float, default=400.0, help="speed of every cable; 0 is unbounded")
    verbs.add_parser("down")
    verbs.add_parser("status")
    run = verbs.add_parser("run", help="run 0 -- python driver.py")
    shape = verbs.add_parser("shape")
    shape.add_argument("--mbit", type=float, required=True)
    limit = verbs.add_parser("limit")
    limit.add_argument("--cpus", type=float, required=True, help="cores' worth of time; 0 lifts the bound")
    kill = verbs.add_parser("kill")
    for verb in (run, shape, limit, kill):
        verb.add_argument("node", type=int)
    return parser


def _up(flags: argparse.Namespace, _: list[str]) -> None:
    words = [sys.executable, "-m", __package__ or "benchmarks.cluster", "--name", flags.name, "hold"]
    words += ["--nodes", str(flags.nodes), "--slots", str(flags.slots), "--mbit", str(flags.mbit)]
    if read_state(flags.name) is not None:
        raise TestBedError(f"a test bed {flags.name!r} is up already", "Take it down first, or give another --name.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER / f"{flags.name}.log"
    with open(log, "wb") as output:
        owner = subprocess.Popen(
            words,
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline_s = time.monotonic() + _UP_TIMEOUT_S
    try:
        while not (state := read_state(flags.name)) or not state["is_ready"]:
            if owner.poll() is not None or time.monotonic() > deadline_s:
                said = log.read_text(errors="replace").strip().splitlines()
                raise TestBedError("the test bed did not come up", said[-1] if said else f"See {log}.")
            time.sleep(0.1)
    except BaseException:
        owner.terminate()
        raise
    print(f"{flags.nodes} nodes are up, the head at {address_of(0)}:{PORT} in there")


def _hold(flags: argparse.Namespace, _: list[str]) -> None:
    """Owns a bed until a signal comes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    bed = TestBed(num_nodes=flags.nodes, slots_per_node=flags.slots, link_mbit=flags.mbit or None, name=flags.name)
    try:
        with bed:
            signal.pause()
    except KeyboardInterrupt:
        pass


def _down(flags: argparse.Namespace, _: list[str]) -> None:
    state = _state(flags)
    os.kill(state["owner"], signal.SIGTERM)
    deadline_s = time.monotonic() + 30
    while is_owned(state) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    (FOLDER / f"{flags.name}.log").unlink(missing_ok=True)


def _status(flags: argparse.Namespace, _: list[str]) -> None:
    for index, node in _state(flags)["nodes"].items():
        if processes.start_ticks(node["pid"]) is None:
            print(f"node {index}  has ended")
            continue
        traffic = network.traffic_of(node["pid"])
        print(f"node {index}  {address_of(int(index))}  sent {traffic.sent_bytes}  received {traffic.received_bytes}")


def _run(flags: argparse.Namespace, inside: list[str]) -> int:
    node = _node(flags)
    words = entering(node["pid"], _group(node), node["cores"], inside)
    settings = {"RAY_ADDRESS": f"{address_of(0)}:{PORT}", "PATH": processes.PATH}
    return subprocess.call(words, env={**os.environ, **SETTINGS, **settings})


def _shape(flags: argparse.Namespace, _: list[str]) -> None:
    pid, owner = _pid(flags), _state(flags)["switch"]
    network.shape(owner, pid, flags.node, flags.mbit)


def _limit(flags: argparse.Namespace, _: list[str]) -> None:
    cpus.limit_cpus(_group(_node(flags)), flags.cpus or None)


def _kill(flags: argparse.Namespace, _: list[str]) -> None:
    os.kill(_pid(flags), signal.SIGKILL)


def _state(flags: argparse.Namespace) -> dict:
    state = read_state(flags.name)
    if state is None:
        raise TestBedError(f"no test bed {flags.name!r} is up", "Start one: python -m benchmarks.cluster up")
    return state


def _node(flags: argparse.Namespace) -> dict:
    nodes = _state(flags)["nodes"]
    if str(flags.node) not in nodes:
        raise TestBedError(f"the test bed has no node {flags.node}", f"It has {', '.join(nodes)}.")
    return nodes[str(flags.node)]


def _group(node: dict) -> Path | None:
    return Path(node["group"]) if node["group"] else None


def _pid(flags: argparse.Namespace) -> int:
    return _node(flags)["pid"]


_VERBS = {
    "up": _up,
    "hold": _hold,
    "down": _down,
    "status": _status,
    "run": _run,
    "shape": _shape,
    "limit": _limit,
    "kill": _kill,
}

if __name__ == "__main__":
    sys.exit(main())
