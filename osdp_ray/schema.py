"""Records: frozen dataclasses that read and write JSON.

`@record("plan", version=1)` above a frozen, keyword-only dataclass gives it `to_json`, `from_json`, `save` and `load`.
The top object of a file carries `record` and `schema_version`; nested records are plain objects. Reading is strict:
a missing or unknown key, a wrong type, another record or another version raises RecordError naming the key.
"""

import dataclasses
import functools
import json
import os
import tempfile
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from osdp_ray.errors import RecordError

_T = TypeVar("_T")


class Record:
    """Base of all records; see the module's docstring."""

    _record_name: typing.ClassVar[str] = ""
    _schema_version: typing.ClassVar[int] = 0

    def to_json(self) -> dict[str, Any]:
        """This record as JSON-ready values, with `record` and `schema_version` on top."""
        return {"record": self._record_name, "schema_version": self._schema_version, **_encode(self)}

    @classmethod
    def from_json(cls, values: Any, *, source: str = "") -> Self:
        """The record that `to_json` wrote. `source` (a path) is named in errors. Raises RecordError."""
        where = source or cls._record_name
        if not isinstance(values, dict):
            raise RecordError(where, f"a {cls._record_name} is a JSON object, this is a {type(values).__name__}")
        values = dict(values)
        name, version = values.pop("record", None), values.pop("schema_version", None)
        if name != cls._record_name:
            raise RecordError(where, f"this is a record of kind {name!r}, and a {cls._record_name!r} is needed")
        if version != cls._schema_version:
            raise RecordError(
                where,
                f"its schema_version is {version!r} and this release reads {cls._schema_version}; write the file anew",
            )
        return _decode(cls, values, where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record as JSON, whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a record's file. Raises RecordError for a missing, damaged or foreign one."""
        return cls.from_json(read_json(path), source=str(path))


def record(name: str, *, version: int) -> typing.Callable[[type[_T]], type[_T]]:
    """Class decorator that names a record and its schema version."""

    def decorate(cls: type[_T]) -> type[_T]:
        cls._record_name = name  # type: ignore[attr-defined]
        cls._schema_version = version  # type: ignore[attr-defined]
        return cls

    return decorate


def write_json(path: str | os.PathLike[str], values: Any) -> None:
    """Writes JSON under a temporary name beside `path`, then renames it, so that no reader sees half a file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON values of a file. Raises RecordError if there is none or it is damaged."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(str(path), f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RecordError(str(path), "it is no text file, so no JSON") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(str(path), f"it is no JSON: {error.msg} in line {error.lineno}") from error


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    return value


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Name -> (type, required) of a dataclass's fields."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    }


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _decode(kind, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise RecordError(where, f"{value!r} is none of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise RecordError(where, f"a list is needed, not {value!r}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            if arguments[0] in (int, str):  # long plain lists, such as traces, are checked without recursion
                return tuple(_plain_list(arguments[0], value, where))
            return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
        if len(arguments) != len(value):
            raise RecordError(where, f"a list of {len(arguments)} is needed, not of {len(value)}")
        return tuple(_decode(argument, item, where) for argument, item in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(where, f"an object is needed, not {value!r}")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Any or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    raise RecordError(where, f"{getattr(kind, '__name__', kind)} is needed, not {value!r}")


def _plain_list(kind: type, values: list[Any], where: str) -> list[Any]:
    for index, item in enumerate(values):
        if type(item) is not kind:
            raise RecordError(f"{where}[{index}]", f"{kind.__name__} is needed, not {item!r}")
    return values


def _decode_dataclass(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise RecordError(where, f"an object is needed, not {values!r}")
    fields = _fields(cls)
    unknown = [key for key in values if key not in fields]
    if unknown:
        raise RecordError(where, f"it has no key {unknown[0]!r}; it has {', '.join(fields)}")
    decoded = {}
    for name, (kind, required) in fields.items():
        if name in values:
            decoded[name] = _decode(kind, values[name], f"{where}.{name}")
        elif required:
            raise RecordError(where, f"the key {name!r} is missing")
    return cls(**decoded)


def format_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table for a terminal: columns padded to their widest cell, numbers (by their look) to the right."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(_looks_numeric(row[column]) for row in rows) if rows else False for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _looks_numeric(cell: str) -> bool:
    return cell in ("", "-") or cell.lstrip("+-")[:1].isdigit()
