"""The index of a save: torch.distributed.checkpoint's list of tensors and chunks, and how it is made and read.

The index is a pickle (torch 2.13 offers no other form): it is read by an unpickler that knows torch's index classes
and nothing else, and tensor data with `weights_only=True`, so that a foreign save cannot run code.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from osdp_ray.errors import SaveError
from osdp_ray.execution.save_files import Place, Streams
from osdp_ray.execution.save_tensors import Offsets, Wholes

OTHER_SAVE = "Delete this folder to go on from the save before it, or start anew with another --out"
INDEX = ".metadata"

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


def read_index(place: Place) -> Metadata:
    """The index of tensors. Raises SaveError where it is missing, damaged, or holds anything but tensors."""
    try:
        index = _IndexUnpickler(io.BytesIO(place.read(INDEX))).load()
        kinds_fit = all(isinstance(stored, TensorStorageMetadata) for stored in index.state_dict_metadata.values())
    except OSError as error:
        reason = error.strerror or error
        raise SaveError(str(place), f"its index {INDEX} cannot be read ({reason})", OTHER_SAVE) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, ImportError, IndexError) as error:
        raise SaveError(str(place), f"its index {INDEX} is damaged or foreign ({error})", OTHER_SAVE) from error
    if not kinds_fit:
        raise SaveError(str(place), f"its index {INDEX} lists more than tensors", OTHER_SAVE)
    return index


def check_files(place: Place, index: Metadata) -> None:
    """Chunks make up every tensor, and each lies within a file that is there. Raises SaveError naming what lacks."""
    for name, stored in index.state_dict_metadata.items():
        found = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        if found != math.prod(stored.size):
            raise SaveError(
                str(place), f"it has {found} of the {math.prod(stored.size)} elements of {name}", OTHER_SAVE
            )
    needed_bytes: dict[str, int] = {}
    for chunk in index.storage_data.values():
        needed_bytes[chunk.relative_path] = max(needed_bytes.get(chunk.relative_path, 0), chunk.offset + chunk.length)
    for name, num_bytes in sorted(needed_bytes.items()):
        if Path(name).name != name:
            raise SaveError(str(place), f"its index names the file {name!r} outside of it", OTHER_SAVE)
        found_bytes = place.size_bytes(name)
        if found_bytes is None:
            raise SaveError(
                str(place), f"the file {name} of one rank is missing", f"All nodes must share the folder. {OTHER_SAVE}"
            )
        if found_bytes < num_bytes:
            raise SaveError(
                str(place), f"the file {name} has {found_bytes} bytes, and {num_bytes} are needed", OTHER_SAVE
            )


class PieceWriter(DefaultSavePlanner):
    """torch's planner for the pieces that this rank writes; `shapes` are those of whole tensors, by name."""

    def __init__(
        self, pieces: dict[str, list[tuple[Offsets, torch.Tensor]]], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        super().__init__()
        self._pieces, self._shapes = pieces, shapes

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.mappings = {name: (name,) for name in self._shapes}  # names are flat for every reader
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self._values = {
            MetadataIndex(name, offsets): values for name, found in self._pieces.items() for offsets, values in found
        }
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=index.offset, sizes=values.size()),
                    properties=TensorProperties(dtype=values.dtype),
                    size=torch.Size(self._shapes[index.fqn]),
                ),
            )
            for index, values in self._values.items()
        ]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._values[index]


class RegionLoader(DefaultLoadPlanner):
    """torch's planner for the regions of tensors that this rank fills."""

    def __init__(self, wholes: Wholes) -> None:
        super().__init__()
        self._regions = {name: {region.offsets: region.values for region in w.regions} for name, w in wholes.items()}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        requests: list[ReadItem] = []
        for name, regions in self._regions.items():
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=values.size())
                for offsets, values in regions.items()
            ]
            stored = self.metadata.state_dict_metadata[name]  # type: ignore[union-attr]
            requests += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(requests)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._regions[index.fqn][tuple(index.offset or ())]


class SafeReader(dcp.FileSystemReader):
    """torch's reader with an index that was read already; it loads every chunk once, and holds one at a time."""

    def __init__(self, place: Place, index: Metadata) -> None:
        super().__init__(place.root if place.fs is None else ".")
        if place.fs is not None:
            self.fs, self.path = Streams(place.fs), place.root
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index

    def read_data(self, plan: LoadPlan, planner: Any) -> "Future[None]":
        by_file: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            by_file.setdefault(stored.relative_path, {}).setdefault(stored.offset, []).append(item)
        for name, by_offset in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for offset in sorted(by_offset):
                    self._read_chunk(stream, by_offset[offset], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, stream: Any, items: list[ReadItem], planner: Any) -> None:
        stored = self.storage_data[items[0].storage_index]
        chunk = torch.load(self._slice_file(stream, stored), map_location="cpu", weights_only=True)
        for item in items:
            part = chunk
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(part)
