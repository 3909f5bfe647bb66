"""Where an exception of the user's own code came from: their file and line, not the library's.

`calling` turns what the user's code raises into a WorkloadError with that place; the exception itself is its cause.
"""

import contextlib
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from osdp_ray.errors import OsdpError, WorkloadError

_PACKAGE = Path(__file__).resolve().parent
_LIBRARY = str(Path(sysconfig.get_path("stdlib")))
_INSTALLED = ("site-packages", "dist-packages")
MEND = "Mend it there."


def _never(error: Exception) -> bool:
    return False


@contextlib.contextmanager
def calling(
    method: str, *, doing: str = "raised", remedy: str = MEND, passes: Callable[[Exception], bool] = _never
) -> Iterator[None]:
    """Within it the user's code runs: what it raises becomes a WorkloadError of `method`.

    An OsdpError is raised as it is, and so is what `passes` says not to be the user's.
    """
    try:
        yield
    except OsdpError:
        raise
    except Exception as error:  # the border to code that is not ours
        if passes(error):
            raise
        raise WorkloadError(method, f"{doing} {summary(error)}", place_of(error), remedy) from error


def summary(error: BaseException) -> str:
    """An exception's type and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def place_of(error: BaseException) -> str:
    """file:line of the innermost frame of the user's own code.

    That is code which lies neither in this package (its workloads excepted), nor in the standard library, nor among
    installed packages; of an installed workload the innermost frame outside of torch.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not _is_ours(frame[0]) and not _is_library(frame[0])]
    users = [frame for frame in own if not any(part in Path(frame[0]).parts for part in _INSTALLED)]
    outside_torch = [frame for frame in own if not _is_torch(frame[0])]
    chosen = users or outside_torch or frames
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else ""


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "workloads")


def _is_library(filename: str) -> bool:
    is_below = filename.startswith(_LIBRARY) and not any(part in Path(filename).parts for part in _INSTALLED)
    return is_below or filename.startswith("<frozen")


def _is_torch(filename: str) -> bool:
    return any(f"{folder}/torch/" in filename for folder in _INSTALLED)
