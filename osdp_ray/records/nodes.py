"""What every node was measured at, and who of them is slow: the slowest and the smallest rule every step."""

import dataclasses
import math
from collections.abc import Callable

from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes, format_seconds

UNEQUAL_FRACTION = 0.25  # nodes that differ by less are taken for equal: so much does the noise of a shared machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeSpeed:
    """What one node was measured at, so that a profile says who is slow. The slowest and the smallest rule a step.

    `compute_s`: a forward and backward of the model with one sample, by the node's slowest rank.
    `link_bytes_per_s`: the faster of its links to its neighbours, None where there is one node. `clock_offset_s`:
    its clock less the driver's.
    """

    address: str
    hostname: str
    num_ranks: int
    memory_bytes: int
    compute_s: float
    link_bytes_per_s: float | None
    clock_offset_s: float


def node_table(nodes: tuple[NodeSpeed, ...]) -> str:
    """A line per node, and who rules the step; '' where nodes were not measured."""
    if not nodes:
        return ""
    rows = [
        (
            node.hostname,
            node.address,
            str(node.num_ranks),
            format_bytes(node.memory_bytes),
            format_seconds(node.compute_s),
            "-" if node.link_bytes_per_s is None else f"{format_bytes(node.link_bytes_per_s)}/s",
        )
        for node in nodes
    ]
    table = format_table(("node", "address", "ranks", "memory", "compute(1)", "link"), rows)
    return "\n".join((table, *slow_nodes(nodes)))


def slow_nodes(nodes: tuple[NodeSpeed, ...]) -> tuple[str, ...]:
    """A sentence for each way in which nodes are unequal by more than UNEQUAL_FRACTION, naming who rules."""
    sentences = []
    if found := _extremes(nodes, lambda node: float(node.memory_bytes)):
        slow, _ = found
        sentences.append(f"{_names(slow)}: the least memory, {format_bytes(slow[0].memory_bytes)}, bounds all")
    if found := _extremes(nodes, lambda node: 1 / node.compute_s if node.compute_s else math.inf):
        slow, fast = found
        ratio = slow[0].compute_s / fast.compute_s
        sentences.append(f"{_names(slow)}: computes {ratio:.1f} times as long as {fast.hostname}; every step waits")
    if found := _extremes(nodes, lambda node: node.link_bytes_per_s or math.inf):
        slow, fast = found
        ratio = (fast.link_bytes_per_s or 0.0) / (slow[0].link_bytes_per_s or 1.0)
        sentences.append(f"{_names(slow)}: link {ratio:.1f} times as slow as {fast.hostname}'s; the rings wait")
    return tuple(sentences)


def _extremes(
    nodes: tuple[NodeSpeed, ...], speed: Callable[[NodeSpeed], float]
) -> tuple[list[NodeSpeed], NodeSpeed] | None:
    """The nodes at the lowest of a speed, the slowest first, and the one at the highest; None where they are alike."""
    if not nodes:
        return None
    best = max(nodes, key=speed)
    slow = sorted((node for node in nodes if speed(node) < (1 - UNEQUAL_FRACTION) * speed(best)), key=speed)
    return (slow, best) if slow and math.isfinite(speed(best)) else None


def _names(nodes: list[NodeSpeed]) -> str:
    return ", ".join(f"node {node.hostname} ({node.address})" for node in nodes)
