"""The folders of saves: which there are, where they lie, and how one is committed.

<run>/saves/step-00000120/     on a disk: committed by the rename of `.unfinished-step-00000120`
                               at a URL: committed by its save.json, which is written last

A URL (`s3://`, `gs://`, `memory://`, ...) is opened by fsspec, or by pyarrow where fsspec lacks the package for it.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase

from osdp_ray.errors import UsageError
from osdp_ray.execution.places import is_url

RECORD = "save.json"
_PREFIX, _ASIDE = "step-", ".unfinished-"
_log = logging.getLogger(__name__)


class Place:
    """A folder on a disk that all nodes share, or at a URL. Errors are OSErrors, or the filesystem's own."""

    def __init__(self, where: "str | os.PathLike[str] | Place", *names: str) -> None:
        if isinstance(where, Place):
            self.fs, root = where.fs, where.root
        elif is_url(where):
            self.fs, root = _open(os.fspath(where))
        else:
            self.fs, root = None, os.fspath(where)
        self.root = "/".join((root.rstrip("/"), *names)) if names else root
        self._text = "/".join((str(where).rstrip("/"), *names)) if names else str(where)

    def __str__(self) -> str:
        return self._text

    @property
    def public(self) -> Path | str:
        """This place as functions give it to callers: a Path, or a URL as text."""
        return Path(self.root) if self.fs is None else self._text

    @property
    def name(self) -> str:
        return self.root.rstrip("/").rpartition("/")[2]

    def names(self) -> list[str]:
        """What lies in it, in order; nothing where it is not there."""
        try:
            if self.fs is None:
                return sorted(os.listdir(self.root))
            self.fs.invalidate_cache()
            return sorted(path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size_bytes(self, name: str) -> int | None:
        """The size of a file in it, None where there is none."""
        try:
            if self.fs is None:
                return os.stat(f"{self.root}/{name}").st_size
            self.fs.invalidate_cache()
            return int(self.fs.size(f"{self.root}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_there(self) -> bool:
        return os.path.isdir(self.root) if self.fs is None else bool(self.names())

    def read(self, name: str) -> bytes:
        if self.fs is None:
            return Path(self.root, name).read_bytes()
        with self.fs.open(f"{self.root}/{name}", "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Writes a file; on a disk it is there for good when this returns."""
        if self.fs is not None:
            with self.fs.open(f"{self.root}/{name}", "wb") as file:
                file.write(data)
            return
        with open(f"{self.root}/{name}", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def make(self) -> None:
        if self.fs is None:
            os.makedirs(self.root)
        else:
            self.fs.makedirs(self.root, exist_ok=True)

    def remove(self) -> None:
        """Removes it with all that lies in it, its record first: half of a deleted save must not pass for one."""
        if self.fs is None:
            shutil.rmtree(self.root)
            return
        if self.size_bytes(RECORD) is not None:
            self.fs.rm(f"{self.root}/{RECORD}")
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)


def _open(url: str) -> tuple[Any, str]:
    """The filesystem of a URL and the path in it. Raises UsageError where nothing here knows it."""
    import fsspec.core

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        first = error
    import pyarrow.fs
    from fsspec.implementations.arrow import ArrowFSWrapper

    try:
        found, path = pyarrow.fs.FileSystem.from_uri(url)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UsageError(
            f"saves cannot go to {url}: fsspec says '{first}', pyarrow '{error}'. Install the package that fsspec "
            "names, or give a folder that all nodes share."
        ) from error
    return ArrowFSWrapper(found), path


class Streams(FileSystemBase):
    """The files of a Place at a URL, as torch.distributed.checkpoint opens them."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._fs.open(os.fspath(path), mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Of the index alone, which counts for nothing before save.json is there."""
        self._fs.copy(os.fspath(path), os.fspath(new_path))
        self._fs.rm(os.fspath(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._fs.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._fs.rm(os.fspath(path))


def writer_to(place: Place) -> dcp.FileSystemWriter:
    """torch's writer of one file per rank, on a disk flushed to it before the index is written."""
    if place.fs is None:
        return dcp.FileSystemWriter(place.root, single_file_per_rank=True, sync_files=True)
    writer = dcp.FileSystemWriter(".", single_file_per_rank=True, sync_files=False)
    writer.fs, writer.path = Streams(place.fs), place.root
    return writer


def saves_of(run_dir: str | os.PathLike[str]) -> Place:
    """Where the saves of a run lie."""
    return Place(Place(run_dir), "saves")


def committed(saves: Place) -> list[Place]:
    """The committed saves, oldest first."""
    return [place for place in _all(saves) if saves.fs is None or place.size_bytes(RECORD) is not None]


def _all(saves: Place) -> list[Place]:
    found = [Place(saves, name) for name in saves.names() if name.startswith(_PREFIX)]
    return [place for place in found if saves.fs is not None or place.is_there()]


def list_saves(run_dir: str | os.PathLike[str]) -> list[Any]:
    """The committed saves of a run, oldest first: Paths, or URLs as texts where the run's saves are at one."""
    return [place.public for place in committed(saves_of(run_dir))]


def latest_save(run_dir: str | os.PathLike[str]) -> Any:
    """The newest committed save of a run, None where there is none."""
    return next(reversed(list_saves(run_dir)), None)


def save_places(saves: Place, step: int) -> tuple[Place, Place]:
    """The place of the save of a step, and the one in which it is written: a hidden one on a disk."""
    name = f"{_PREFIX}{step:08d}"
    target = Place(saves, name)
    return target, target if saves.fs is not None else Place(saves, f"{_ASIDE}{name}")


def make_unfinished(saves: Place, unfinished: Place) -> None:
    """An empty folder to write in; what earlier writers left unfinished is removed."""
    remove_unfinished(saves)
    unfinished.make()


def remove_unfinished(saves: Place) -> None:
    """Removes what writers left behind that were killed or failed."""
    if saves.fs is None:
        leftovers = [Place(saves, name) for name in saves.names() if name.startswith(_ASIDE)]
    else:
        leftovers = [place for place in _all(saves) if place.size_bytes(RECORD) is None]
    for leftover in leftovers:
        leftover.remove()


def commit(unfinished: Place, target: Place) -> None:
    """Makes a written save visible at once and whole; at a URL the record that was written last has done so."""
    if target.fs is not None:
        return
    _sync(unfinished.root)
    os.rename(unfinished.root, target.root)
    _sync(os.path.dirname(target.root))


def _sync(directory: str) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_old(saves: Place, keep: int) -> None:
    """Deletes all but the newest `keep` saves, at least one. What cannot be deleted is told in the log."""
    for old in committed(saves)[: -max(keep, 1)]:
        try:
            if old.fs is None:
                aside = Place(saves, f"{_ASIDE}{old.name}")  # half of a deleted save must not pass for one
                os.rename(old.root, aside.root)
                old = aside
            old.remove()
        except OSError as error:
            _log.warning("the old save %s cannot be deleted (%s)", old, error)
