"""A real Ray cluster of several nodes on one machine, with real links between them.

Every node is a set of Linux namespaces of its own (network, mounts, processes, host name) with an address of its own;
a bridge in one more network namespace joins them, and a token bucket on either end of each cable bounds its speed. So
ranks of one node talk over loopback, ranks of different nodes over the shaped link.

    with TestBed(num_nodes=2, slots_per_node=2, link_mbit=400) as bed:
        bed.run(0, [sys.executable, "driver.py"])       # a driver inside the first node; RAY_ADDRESS is set there

`python -m benchmarks.cluster up | run | shape | limit | kill | down` does the same from a shell.
"""

from .errors import TestBedError
from .network import Switch, Traffic
from .nodes import Node
from .testbed import TestBed, missing_requirement, remove_leftovers

__all__ = [
    "Node",
    "Switch",
    "TestBed",
    "TestBedError",
    "Traffic",
    "missing_requirement",
    "remove_leftovers",
]
