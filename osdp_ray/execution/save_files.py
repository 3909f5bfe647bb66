"""The folders of saves on disk: which there are, their index of tensors, and how one is committed.

<run>/saves/step-00000120/     committed by the rename of `.unfinished-step-00000120`
"""

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from osdp_ray.errors import SaveError

OTHER_SAVE = "Delete this folder to go on from the save before it, or start anew with another --out"
INDEX = ".metadata"
_PREFIX, _ASIDE = "step-", ".unfinished-"


def list_saves(run_dir: str | os.PathLike[str]) -> list[Path]:
    """The committed saves of a run, oldest first."""
    return sorted(path for path in Path(run_dir, "saves").glob(f"{_PREFIX}*") if path.is_dir())


def latest_save(run_dir: str | os.PathLike[str]) -> Path | None:
    """The newest committed save of a run, None where there is none."""
    return max(list_saves(run_dir), default=None)


def save_path(run_dir: str | os.PathLike[str], step: int) -> tuple[Path, Path]:
    """The folder of the save of a step, and the hidden one in which it is written."""
    name = f"{_PREFIX}{step:08d}"
    return Path(run_dir, "saves", name), Path(run_dir, "saves", f"{_ASIDE}{name}")


def make_unfinished(unfinished: Path) -> None:
    """An empty folder to write in; what earlier writers left unfinished is removed."""
    for leftover in unfinished.parent.glob(f"{_ASIDE}*"):
        shutil.rmtree(leftover)
    unfinished.mkdir(parents=True)


def commit(unfinished: Path, target: Path) -> None:
    """Makes a written save visible at once and whole."""
    _sync(unfinished)
    os.rename(unfinished, target)
    _sync(target.parent)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_old(run_dir: str | os.PathLike[str], keep: int) -> None:
    """Deletes all but the newest `keep` saves, at least one."""
    for old in list_saves(run_dir)[: -max(keep, 1)]:
        aside = old.with_name(f"{_ASIDE}{old.name}")  # half of a deleted save must not pass for one
        os.rename(old, aside)
        shutil.rmtree(aside)


_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch's index and refuses everything else that a pickle could name."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no save has")


def read_index(path: Path) -> Metadata:
    """The index of tensors. Raises SaveError where it is missing, damaged, or holds anything but tensors."""
    try:
        index = _IndexUnpickler(io.BytesIO((path / INDEX).read_bytes())).load()
        kinds_fit = all(isinstance(stored, TensorStorageMetadata) for stored in index.state_dict_metadata.values())
    except OSError as error:
        raise SaveError(str(path), f"its index {INDEX} cannot be read ({error.strerror})", OTHER_SAVE) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, ImportError, IndexError) as error:
        raise SaveError(str(path), f"its index {INDEX} is damaged or foreign ({error})", OTHER_SAVE) from error
    if not kinds_fit:
        raise SaveError(str(path), f"its index {INDEX} lists more than tensors", OTHER_SAVE)
    return index


class SafeReader(dcp.FileSystemReader):
    """torch's reader with the restricted unpickler for the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def check_files(path: Path, index: Metadata) -> None:
    """Every chunk of the index lies within a file that is there. Raises SaveError naming the file."""
    needed_bytes: dict[str, int] = {}
    for chunk in index.storage_data.values():
        needed_bytes[chunk.relative_path] = max(needed_bytes.get(chunk.relative_path, 0), chunk.offset + chunk.length)
    for name, num_bytes in sorted(needed_bytes.items()):
        if Path(name).name != name:
            raise SaveError(str(path), f"its index names the file {name!r} outside of it", OTHER_SAVE)
        if not (path / name).is_file():
            raise SaveError(
                str(path), f"the file {name} of one rank is missing", f"All nodes must share the folder. {OTHER_SAVE}"
            )
        if (found_bytes := (path / name).stat().st_size) < num_bytes:
            raise SaveError(
                str(path), f"the file {name} has {found_bytes} bytes, and {num_bytes} are needed", OTHER_SAVE
            )
