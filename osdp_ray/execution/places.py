"""Names of places: a path of a disk, or a URL of some other filesystem. Loads neither torch nor fsspec."""

import os
from pathlib import Path


def is_url(where: str | os.PathLike[str]) -> bool:
    """Whether this names a place that is no path of a disk."""
    return "://" in os.fspath(where)


def absolute(where: str | os.PathLike[str]) -> str:
    """A place by a name that holds in every process: an absolute path, or the URL itself."""
    return os.fspath(where) if is_url(where) else str(Path(where).resolve())


def place_of(name: str) -> Path | str:
    """The path or URL that `absolute` or a save has named."""
    return name if is_url(name) else Path(name)
