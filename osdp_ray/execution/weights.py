"""Weights that others wrote: a model starts from safetensors files, or from the model in a save.

Every rank reads the regions that it has, and nothing else; tensors go by the model's own names.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from osdp_ray.errors import SaveError
from osdp_ray.execution.places import absolute, is_url
from osdp_ray.execution.save_files import RECORD, Place, latest_save
from osdp_ray.execution.save_tensors import Region, collect
from osdp_ray.execution.saves import agreeing, load
from osdp_ray.modeling.splitting import slices_of
from osdp_ray.schema import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "Give a folder or file of safetensors, a run, or a save"


def load_weights(path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True) -> None:
    """Fills a model (sharded and split or not) from a safetensors file, a folder of them, a save, or a run's newest.

    Tied tensors may be there under any of their names. Raises SaveError where there are no such weights, and where
    tensors differ in shape or, if `strict`, in name, listing them.
    """
    save = find_save(path)
    if save is not None:
        load(save, model, strict=strict)
        return
    files = find_files(path)
    wholes = {name.removeprefix("model."): whole for name, whole in collect(model, None)[0].items()}
    aliases = _aliases(model)
    with _Files(path, files) as opened:
        sources = {name: _source(name, aliases, opened.shapes) for name in wholes}
        used = {source for source in sources.values() if source is not None}
        ties = {name for names in aliases.values() for name in names if used & set(names)}
        shapes = {name: opened.shapes[source] for name, source in sources.items() if source is not None}
        shapes |= {name: shape for name, shape in opened.shapes.items() if name not in used | ties}
        for name, whole in agreeing(str(path), wholes, shapes, strict).items():
            for region in whole.regions:
                region.values.detach().copy_(opened.read(sources[name], region))


def find_save(path: str | os.PathLike[str]) -> Any:
    """The save that a path names: itself, or the newest of a run; None where it is neither."""
    if Place(path).size_bytes(RECORD) is not None:
        return path
    return latest_save(path)


def find_files(path: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a path, which may be one. Raises SaveError where there are none."""
    if is_url(path):
        raise SaveError(str(path), "there is no save at this URL", f"{_REMEDY}; safetensors are read from disks")
    where = Path(path)
    if where.is_file():
        if where.suffix != ".safetensors":
            raise SaveError(str(path), "it is no safetensors file, and others can run code when they are read", _REMEDY)
        return [where]
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else []
    if (where / INDEX).is_file():
        listed = set(read_json(where / INDEX).get("weight_map", {}).values())
        if missing := sorted(listed - {file.name for file in files}):
            raise SaveError(str(path), f"its index names {missing[0]}, which is not there", "Fetch or export it anew")
        files = [file for file in files if file.name in listed]
    elif (where / SINGLE).is_file():
        files = [where / SINGLE]
    if not files:
        what = "there are no safetensors and no save in it" if where.is_dir() else "there is no such file or folder"
        raise SaveError(str(path), what, _REMEDY)
    return files


def check_weights(path: str | os.PathLike[str]) -> str:
    """The absolute name of weights that `load_weights` can look into; raises SaveError before any worker starts."""
    if find_save(path) is None:
        find_files(path)
    return absolute(path)


class _Files:
    """Open safetensors files as one mapping; `shapes` are those of their tensors."""

    def __init__(self, path: str | os.PathLike[str], files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self.shapes: dict[str, tuple[int, ...]] = {}
        self._slices: dict[str, Any] = {}
        self._open: list[Any] = []
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                self.__exit__()
                raise SaveError(
                    str(path), f"{file.name} cannot be read ({error})", "Fetch or export it anew"
                ) from error
            self._open.append(opened)
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                self._slices[name] = opened.get_slice(name)
                self.shapes[name] = tuple(self._slices[name].get_shape())

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._slices.clear()
        self._open.clear()  # files are mapped as long as something of them is there

    def read(self, name: str, region: Region) -> torch.Tensor:
        if region.values.dim() == 0:
            return self._slices[name][...]
        where = zip(region.offsets, region.values.shape, strict=True)
        return self._slices[name][tuple(slice(start, start + length) for start, length in where)]


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """First name of a tied tensor -> all its names, as the model's author knows them."""
    by_tensor: dict[int, list[str]] = {}
    slices = slices_of(model)
    for fqn, tensor in _tensors(model):
        piece = slices.get(fqn)
        by_tensor.setdefault(id(tensor), []).append(piece.name if piece else fqn)
    return {names[0]: names for names in by_tensor.values()}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _source(name: str, aliases: dict[str, list[str]], shapes: dict[str, Any]) -> str | None:
    """The name under which a tensor is in the files, None where it is not."""
    return next((alias for alias in aliases.get(name, [name]) if alias in shapes), name if name in shapes else None)
