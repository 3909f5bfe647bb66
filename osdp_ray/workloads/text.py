"""Text as bytes: a path -> a corpus -> windows of `sequence + 1` bytes, the same on every rank and machine.

Where no path is given, the corpus is the source of Python's own standard library (about 12 MB, without its tests).
A path is a file (its bytes as they are), a Parquet file (a column of text), or a folder of both.

A corpus of N bytes is cut into stretches of S bytes; every 20th stretch, from the first one on, is held out:

    S       = max(sequence + 1, min(64 KiB, N // 20))
    runs    = S held out, 19 S trained on, S held out, 19 S trained on, ...     the last one is cut short
    windows = (length - 1) // sequence of a run, `sequence` bytes apart; none crosses from one part into the other

Sample i = 0, 1, 2, ... without end is window `order(epoch)[i % W]` of the W trained on, where epoch = i // W and each
epoch's order is a permutation drawn from (seed, epoch) alone. So any sample is found without the ones before it.
"""

import functools
import hashlib
import mmap
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from osdp_ray.errors import DataError
from osdp_ray.units import KIB

if TYPE_CHECKING:
    import pyarrow as pa

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, int64 [micro_batch, sequence]

DEFAULT_NAME = "python-stdlib"
_OWN = torch.contiguous_format
_STRETCH_BYTES = 64 * KIB
_STRETCHES_PER_HELD_OUT = 20
_LEFT_OUT = frozenset(("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"))
_USE_OTHER_TEXT = "Give another --data (a file, a folder or a Parquet file), or none for Python's standard library"


class Corpus:
    """The bytes of a text, cut into windows of `sequence + 1` for training and for evaluation.

    `text` is uint8 [N], and `name` stands for it in errors. Raises DataError where either part would hold no window.
    """

    def __init__(self, text: torch.Tensor, sequence: int, name: str) -> None:
        num_bytes, least_bytes = text.numel(), 2 * (sequence + 1)
        if num_bytes < least_bytes:
            raise DataError(
                name,
                f"{num_bytes} bytes are shorter than one sequence of {sequence} + 1 for training and one to hold out, "
                f"{least_bytes} bytes",
                f"Lower --seq to at most {max(num_bytes // 2 - 1, 1)}, or give more text by --data",
            )
        self.text, self.sequence = text, sequence
        stretch = max(sequence + 1, min(_STRETCH_BYTES, num_bytes // _STRETCHES_PER_HELD_OUT))
        period = stretch * _STRETCHES_PER_HELD_OUT
        firsts = range(0, num_bytes, period)
        self._held_out_runs = [(first, min(first + stretch, num_bytes)) for first in firsts]
        train_runs = [(first + stretch, min(first + period, num_bytes)) for first in firsts]
        self._held_out_starts = _window_starts(self._held_out_runs, sequence)
        self._train_starts = _window_starts(train_runs, sequence)

    @property
    def num_train_windows(self) -> int:
        return self._train_starts.numel()

    @property
    def num_held_out_windows(self) -> int:
        return self._held_out_starts.numel()

    @property
    def held_out_text(self) -> torch.Tensor:
        """All held-out bytes, uint8."""
        return torch.cat([self.text[first:end] for first, end in self._held_out_runs])

    def train_batches(self, rank: int, num_ranks: int, micro_batch: int, seed: int, start_step: int) -> Iterator[Batch]:
        """Micro-batches start_step, start_step + 1, ... of one rank, as `Workload.build_batches` orders samples."""
        epoch, order = -1, self._train_starts
        step = start_step
        while True:
            first = (step * num_ranks + rank) * micro_batch
            starts = torch.empty(micro_batch, dtype=torch.int64)
            for j in range(micro_batch):
                needed, position = divmod(first + j, self.num_train_windows)
                if needed != epoch:
                    epoch, order = needed, _order(self.num_train_windows, seed, needed)
                starts[j] = self._train_starts[order[position]]
            yield self._windows(starts)
            step += 1

    def held_out_batches(self, rank: int, num_ranks: int, micro_batch: int, num_windows: int) -> list[Batch]:
        """One rank's share of `num_windows` held-out windows that lie evenly over the held-out text.

        Every rank gets `num_windows // num_ranks` of them (at least one), in micro-batches of one size: the largest one
        up to `micro_batch` that divides this share, so that the mean over batches is the mean over windows. The
        windows are therefore the same for every micro-batch, and for every number of ranks that divides their number;
        for others the last `num_windows % num_ranks` stay out.
        """
        num_windows = min(num_windows, self.num_held_out_windows)
        share = max(num_windows // num_ranks, 1)
        size = next(size for size in range(min(micro_batch, share), 0, -1) if share % size == 0)
        chosen = torch.arange(rank, share * num_ranks, num_ranks) % num_windows
        starts = self._held_out_starts[chosen * self.num_held_out_windows // num_windows]
        return [self._windows(starts[first : first + size]) for first in range(0, share, size)]

    def _windows(self, starts: torch.Tensor) -> Batch:
        windows = self.text[starts[:, None] + torch.arange(self.sequence + 1)].long()  # [micro_batch, sequence + 1]
        # One window would be contiguous as it is, and both would share its storage.
        return windows[:, :-1].clone(memory_format=_OWN), windows[:, 1:].clone(memory_format=_OWN)


def open_corpus(data: str, sequence: int) -> Corpus:
    """The corpus of a path ('' for the default one), its text read once per process and unchanged state of the files.

    Raises DataError where it is missing, unreadable, empty, damaged, or too short for this sequence.
    """
    return Corpus(_read(data, _stamps(data)), sequence, data or DEFAULT_NAME)


def data_bytes(data: str) -> int:
    """The size of the files of a corpus on disk, without reading them. Raises DataError like `open_corpus`."""
    return sum(size_bytes for _, size_bytes, _ in _stamps(data))


def unigram_entropy_nats(text: torch.Tensor) -> float:
    """The entropy in nats of one byte of a text (uint8 [N]): the least mean loss of a model that sees no context."""
    fractions = torch.bincount(text, minlength=256).double() / max(text.numel(), 1)
    return -torch.special.xlogy(fractions, fractions).sum().item()


def _window_starts(runs: list[tuple[int, int]], sequence: int) -> torch.Tensor:
    """Offsets of the windows that fit into these runs (first, end), int64."""
    return torch.cat([torch.arange(first, max(first, end - sequence), sequence) for first, end in runs])


def _order(num_windows: int, seed: int, epoch: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(num_windows, generator=generator)


def _stamps(data: str) -> tuple[tuple[str, int, int], ...]:
    """Path, bytes and modification time of every file of a corpus, in the order in which they are read."""
    name = data or DEFAULT_NAME
    root = Path(data or sysconfig.get_path("stdlib"))
    try:
        if data and not root.exists():
            raise DataError(name, "there is no such file or folder", f"Correct the path. {_USE_OTHER_TEXT}")
        if data and not root.is_dir():
            if not root.is_file():
                raise DataError(name, "it is neither a file nor a folder", _USE_OTHER_TEXT)
            paths = [root]
        else:
            paths = _files_below(root, standard_library=not data)
        stats = [(str(path), path.stat()) for path in paths]
    except OSError as error:
        raise _unreadable(name, error) from error
    if not stats:
        what = "no source file" if not data else "no file that is neither hidden nor special"
        raise DataError(name, f"the folder {root} holds {what}", _USE_OTHER_TEXT)
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _files_below(root: Path, standard_library: bool) -> list[Path]:
    """Regular files below a folder, by their relative path; of the standard library only its sources, without tests."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, names, files in os.walk(root, onerror=fail):
        names[:] = [name for name in names if not name.startswith(".")]
        if standard_library:
            names[:] = [name for name in names if name not in _LEFT_OUT]
            files = [file for file in files if file.endswith(".py")]
        found += [Path(folder, file) for file in files if not file.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).parts)


@functools.lru_cache(maxsize=2)
def _read(data: str, stamps: tuple[tuple[str, int, int], ...]) -> torch.Tensor:
    """The text of these files, uint8 [N]. A single plain file is mapped, not copied."""
    name = data or DEFAULT_NAME
    is_folder = not data or os.path.isdir(data)
    try:
        if not is_folder and not _is_parquet(data):
            return _map(data, name)
        text = bytearray()
        for path, _, _ in stamps:
            if _is_parquet(path):
                text += _read_parquet(path)
                continue
            content = Path(path).read_bytes()
            if not is_folder or b"\0" not in content[: 8 * KIB]:
                text += content
    except OSError as error:
        raise _unreadable(name, error) from error
    if not text:
        raise _empty(name)
    return torch.frombuffer(text, dtype=torch.uint8)


def _map(path: str, name: str) -> torch.Tensor:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise _empty(name)
        # Copy on write, because torch wants a buffer that could be written; nothing ever is.
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def _read_parquet(path: str) -> bytes:
    """The rows of the text column, a line break after each: the column `text`, or the only one of strings or bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(path, "rb") as source:
        try:
            file = pq.ParquetFile(source)
            column = _text_column(file.schema_arrow, path)
            parts = [_as_bytes(batch.column(0)) for batch in file.iter_batches(columns=[column])]
        except (pa.ArrowException, OSError) as error:
            problem = f"it is no readable Parquet file ({str(error).splitlines()[0]})"
            raise DataError(path, problem, f"Write it again. {_USE_OTHER_TEXT}") from error
    return b"".join(parts)


def _as_bytes(column: "pa.Array") -> bytes:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    rows = column.cast(pa.large_binary()).to_pylist()  # as bytes, because strings of a file may be no valid UTF-8
    return b"".join(row + b"\n" for row in rows if row is not None)


def _text_column(schema: "pa.Schema", path: str) -> str:
    import pyarrow as pa

    def holds_text(kind: pa.DataType) -> bool:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        tests = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
        return any(getattr(pa.types, test)(kind) for test in tests)

    columns = [field.name for field in schema if holds_text(field.type)]
    if "text" in columns:
        return "text"
    if len(columns) != 1:
        found = f"{len(columns)} columns of strings or bytes ({', '.join(columns)})" if columns else "no column of text"
        remedy = "Name the column to read 'text', or write a file that holds only that one"
        raise DataError(path, f"it has {found} among {', '.join(schema.names) or 'none'}", remedy)
    return columns[0]


def _empty(name: str) -> DataError:
    return DataError(name, "it holds no text (0 bytes)", _USE_OTHER_TEXT)


def _unreadable(name: str, error: OSError) -> DataError:
    problem = f"{error.filename or name} cannot be read ({error.strerror or error})"
    return DataError(name, problem, f"Let this user read it on every node. {_USE_OTHER_TEXT}")
