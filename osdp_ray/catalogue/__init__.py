"""Cluster files: YAML -> Hardware, from the catalogue beside this module or from a file of the user's own.

docs/clusters.md describes the format. Every figure of the catalogue names its source.
"""

import os
from importlib import resources
from typing import cast

from osdp_ray.catalogue.reading import Mapping, did_you_mean, read_mapping
from osdp_ray.errors import ClusterFileError, UsageError
from osdp_ray.records.hardware import Backend, DeviceSpec, Hardware, LinkSpec, NodeGroup
from osdp_ray.records.profile import DeviceKind, Precision
from osdp_ray.units import MIB, parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_seconds

__all__ = ["catalogue_names", "load_hardware", "parse_hardware"]

_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
# Assumptions where a file says nothing: what a process holds of a GPU outside the allocator of tensors. A profile that
# is measured on the devices has their own figures.
_CONTEXT_BYTES = 512 * MIB
_COMMUNICATOR_BYTES = 512 * MIB
_BACKEND_OF: dict[DeviceKind, Backend] = {"cuda": "nccl", "cpu": "gloo"}


def catalogue_names() -> tuple[str, ...]:
    """The names that `--cluster` knows, without their '.yaml'."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def load_hardware(name_or_path: str) -> Hardware:
    """The hardware of a catalogue's name or of a file.

    Raises UsageError where there is neither, ClusterFileError (file, line, key) for a file that describes none.
    """
    names = catalogue_names()
    if name_or_path in names:
        text = (resources.files(__package__) / f"{name_or_path}.yaml").read_text(encoding="utf-8")
        return parse_hardware(text, path=f"{name_or_path}.yaml")
    if not os.path.exists(name_or_path):
        raise UsageError(
            f"no cluster is called {name_or_path!r}, and no file{did_you_mean(name_or_path, names)}. "
            f"Give --cluster a YAML file (see docs/clusters.md), or one of {', '.join(names)}."
        )
    try:
        with open(name_or_path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{name_or_path} cannot be read ({error.strerror}). Give --cluster a YAML file.") from error
    except UnicodeDecodeError as error:
        raise ClusterFileError(name_or_path, 1, "", "it is no text", "Give --cluster a YAML file") from error
    return parse_hardware(text, path=name_or_path)


def parse_hardware(text: str, *, path: str) -> Hardware:
    """The hardware that a YAML text describes; `path` is named in errors. Raises ClusterFileError."""
    top = read_mapping(path, text)
    hardware_name, source = top.text("name"), _source(top)
    backend = top.choice("backend", ("nccl", "gloo"))
    overlaps = top.choice("overlap", ("true", "false")) == "true"
    groups = tuple(_group(part, backend) for part in top.mappings("nodes"))
    num_nodes = sum(group.num_nodes for group in groups)
    across = _link(top.mapping("across")) if top.has("across") or num_nodes > 1 else None
    top.finish()
    return Hardware(
        name=hardware_name,
        backend=cast("Backend", backend),
        overlaps=overlaps,
        groups=groups,
        across=across,
        source=source,
    )


def _group(part: Mapping, backend: str) -> NodeGroup:
    num_nodes, devices = part.count("count"), part.count("devices")
    device = part.mapping("device")
    spec = _device(device)
    if _BACKEND_OF[spec.kind] != backend:
        raise device.fault_at(
            "kind", f"{spec.kind!r} devices do not communicate by {backend}", f"Use backend {_BACKEND_OF[spec.kind]}"
        )
    link = _link(part.mapping("link")) if part.has("link") or devices > 1 else None
    part.finish()
    return NodeGroup(num_nodes=num_nodes, devices_per_node=devices, device=spec, link=link)


def _device(part: Mapping) -> DeviceSpec:
    kind = cast("DeviceKind", part.choice("kind", ("cuda", "cpu")))
    peaks, fractions = part.mapping("peak"), part.mapping("achieved")
    precisions = [precision for precision in _PRECISIONS if peaks.has(precision)]
    if "fp32" not in precisions:
        peaks.text("fp32")  # every model has some of it
    spec = DeviceSpec(
        kind=kind,
        name=part.text("name"),
        memory_bytes=part.quantity("memory", parse_bytes),
        memory_bytes_per_s=part.quantity("memory_bandwidth", parse_bytes_per_s),
        memory_achieved_fraction=part.fraction("memory_achieved"),
        peak_flops_per_s={precision: peaks.quantity(precision, parse_flops_per_s) for precision in precisions},
        achieved_fraction={precision: fractions.fraction(precision) for precision in precisions},
        launch_s=part.quantity("launch", parse_seconds, least=0) if kind == "cuda" or part.has("launch") else 0.0,
        context_bytes=_beside(part, kind, "context", _CONTEXT_BYTES),
        communicator_bytes=_beside(part, kind, "communicators", _COMMUNICATOR_BYTES),
        source=_source(part),
    )
    for mapping in (peaks, fractions, part):
        mapping.finish()
    return spec


def _beside(part: Mapping, kind: DeviceKind, key: str, assumed_bytes: int) -> int:
    if part.has(key):
        return part.quantity(key, parse_bytes, least=0)
    return assumed_bytes if kind == "cuda" else 0


def _link(part: Mapping) -> LinkSpec:
    link = LinkSpec(
        bytes_per_s=part.quantity("bandwidth", parse_bytes_per_s),
        achieved_fraction=part.fraction("achieved"),
        latency_s=part.quantity("latency", parse_seconds, least=0),
        source=_source(part),
    )
    part.finish()
    return link


def _source(part: Mapping) -> str:
    return part.text("source") if part.has("source") else ""
