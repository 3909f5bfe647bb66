"""A save's model as safetensors files that `from_pretrained` reads; the model is never whole in memory.

A safetensors file is 8 bytes with the length of its header, the header (JSON: dtype, shape and place of every tensor),
and the tensors one after the other. The index of a save tells all of it, so a file is laid out first, reserved on the
disk, mapped, and filled by the same reader that fills a model: one piece of a save at a time.
"""

import json
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from osdp_ray.errors import SaveError, UsageError
from osdp_ray.execution.save_files import Place
from osdp_ray.execution.save_index import check_files, read_index
from osdp_ray.execution.save_tensors import own
from osdp_ray.execution.saves import fill, read_save
from osdp_ray.execution.weights import INDEX, SINGLE, find_save
from osdp_ray.units import GIB

DEFAULT_FILE_BYTES = 5 * GIB
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    dtype: str | None = None,
) -> list[Path]:
    """Writes the model of a save, or of a run's newest, to a folder, and returns the files.

    `model.safetensors`, or several of at most `max_file_bytes` (a larger tensor has one for itself) with an index, as
    transformers names them; `config.json` beside them where the workload gives one. Tied tensors are there once, under
    their first name, as transformers ties them itself. `dtype` (fp32, bf16, fp16) converts what is floating-point.
    Raises SaveError for what is no whole save, UsageError where the folder cannot take the files.
    """
    save = find_save(path)
    if save is None:
        raise SaveError(str(path), "there is no save in it", "Give a run that has saved, or a save of one")
    facts, place, folder = read_save(save), Place(save), Path(out)
    index = read_index(place)
    check_files(place, index)
    prefix = "model."
    stored = {n.removeprefix(prefix): s for n, s in sorted(index.state_dict_metadata.items()) if n.startswith(prefix)}
    wanted = None if dtype is None else _PRECISIONS[dtype]
    kinds = {name: _kind(str(path), name, tensor.properties.dtype, wanted) for name, tensor in stored.items()}
    shapes = {name: tuple(tensor.size) for name, tensor in stored.items()}
    groups = _groups(shapes, kinds, max_file_bytes)
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    )
    ready: list[tuple[Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(folder.glob("*.safetensors")):
            raise UsageError(f"{folder} holds {there[0].name} already. Give --out a folder without safetensors.")
        aside = folder / f".unfinished-{secrets.token_hex(4)}"
        aside.mkdir()
        try:
            for name, group in zip(names, groups, strict=True):
                _write(aside / name, {tensor: shapes[tensor] for tensor in group}, kinds, place, index)
                ready.append((aside / name, folder / name))
            for name, values in _beside(facts.config, names, groups, shapes, kinds).items():
                (aside / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
                ready.append((aside / name, folder / name))
            for written, target in ready:
                os.replace(written, target)
        finally:
            for leftover in aside.iterdir():
                leftover.unlink()
            aside.rmdir()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot take the export ({error}). Free space there, or give another --out."
        ) from error
    return [target for _, target in ready]


def _kind(path: str, name: str, saved: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    kind = wanted if wanted is not None and saved.is_floating_point else saved
    if kind not in _DTYPES:
        raise SaveError(
            path,
            f"{name} is of {kind}, which safetensors cannot hold",
            "Take it out of the model, or keep it as another kind",
        )
    return kind


def _groups(shapes: dict[str, tuple[int, ...]], kinds: dict[str, torch.dtype], max_file_bytes: int) -> list[list[str]]:
    """Tensors by file, in the order of their names."""
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name, shape in shapes.items():
        num_bytes = _num_bytes(shape, kinds[name])
        if groups[-1] and group_bytes + num_bytes > max_file_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += num_bytes
    return groups


def _num_bytes(shape: tuple[int, ...], kind: torch.dtype) -> int:
    return torch.Size(shape).numel() * kind.itemsize


def _write(
    path: Path, shapes: dict[str, tuple[int, ...]], kinds: dict[str, torch.dtype], place: Place, index: Any
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name in sorted(shapes, key=lambda name: (-kinds[name].itemsize, name)):  # so that every tensor is aligned
        starts[name] = position
        position += _num_bytes(shapes[name], kinds[name])
        header[name] = {
            "dtype": _DTYPES[kinds[name]],
            "shape": list(shapes[name]),
            "data_offsets": [starts[name], position],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    with open(path, "wb+") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, first + position)  # a full disk is an error here, and a crash later
        else:
            file.truncate(first + position)
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0)
        _fill(mapped, first, shapes, kinds, starts, place, index)
        mapped.flush()
        os.fsync(file.fileno())


def _fill(
    mapped: mmap.mmap,
    first: int,
    shapes: dict[str, tuple[int, ...]],
    kinds: dict[str, torch.dtype],
    starts: dict[str, int],
    place: Place,
    index: Any,
) -> None:
    """Reads every tensor into its place in the mapped file."""
    wholes = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        if count:
            flat = torch.frombuffer(mapped, dtype=kinds[name], count=count, offset=first + starts[name])
            wholes[f"model.{name}"] = own(flat.view(shape))
    fill(place, index, wholes)


def _beside(
    config: dict[str, Any] | None,
    names: list[str],
    groups: list[list[str]],
    shapes: dict[str, tuple[int, ...]],
    kinds: dict[str, torch.dtype],
) -> dict[str, Any]:
    """The JSON files beside the tensors, by name."""
    found: dict[str, Any] = {}
    if len(names) > 1:
        total = sum(_num_bytes(shape, kinds[name]) for name, shape in shapes.items())
        weight_map = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        found[INDEX] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    if config is not None:
        found["config.json"] = config
    return found
