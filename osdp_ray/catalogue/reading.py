"""YAML with line numbers: mappings, lists and values whose every fault names the file, the line and the key.

Only the YAML's structure is read (`yaml.compose`), so no tag can construct an object.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import yaml

from osdp_ray.errors import ClusterFileError

_T = TypeVar("_T")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Mapping:
    """A YAML mapping while it is read: every key is asked for, and `finish` refuses those that were not."""

    def __init__(self, path: str, node: yaml.Node, key: str) -> None:
        self.path, self.key = path, key
        self.line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise self.fault("", f"keys with values are needed, not {_shown(node)}", "See docs/clusters.md", node)
        self._values: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        self._asked: list[str] = []
        for name, value in node.value:
            text = name.value if isinstance(name, yaml.ScalarNode) else ""
            if not text:
                raise self.fault("", "a key must be a word", "See docs/clusters.md", name)
            if text in self._values:
                first = self._values[text][0].start_mark.line + 1
                raise self.fault(text, f"it stands here a second time, first in line {first}", "Keep one", name)
            self._values[text] = (name, value)

    def fault(self, name: str, problem: str, remedy: str, node: yaml.Node | None = None) -> ClusterFileError:
        """The error for a key of this mapping, or for all of it where `name` is ''; in the line of `node`, if given."""
        line = self.line if node is None else node.start_mark.line + 1
        return ClusterFileError(self.path, line, self._full(name), problem, remedy)

    def fault_at(self, name: str, problem: str, remedy: str) -> ClusterFileError:
        """The error for the value of a key that is there."""
        return self.fault(name, problem, remedy, self._values[name][1])

    def has(self, name: str) -> bool:
        """Whether a key is there; asking makes it a known one."""
        self._asked.append(name)
        return name in self._values

    def text(self, name: str) -> str:
        """A value that is no mapping and no list, and not empty."""
        node = self._need(name)
        if not isinstance(node, yaml.ScalarNode):
            raise self.fault(name, f"one value is needed, not {_shown(node)}", "See docs/clusters.md", node)
        if not node.value.strip() or node.tag == "tag:yaml.org,2002:null":
            raise self.fault(name, "it has no value", "Give it one, or leave an optional key out", node)
        return str(node.value)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        text = self.text(name)
        if text not in choices:
            near = did_you_mean(text, choices)
            raise self.fault_at(name, f"{text!r} is none of {', '.join(choices)}{near}", "Use one of them")
        return text

    def count(self, name: str) -> int:
        """A whole number from 1 up."""
        text = self.text(name)
        if not text.isdecimal() or int(text) < 1:
            raise self.fault_at(name, f"{text!r} is no whole number above 0", "Give it one, such as 8")
        return int(text)

    def fraction(self, name: str) -> float:
        """A number above 0, at most 1."""
        text = self.text(name)
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number <= 1:
            raise self.fault_at(name, f"{text!r} is no fraction above 0 and at most 1", "Give it one, such as 0.8")
        return number

    def quantity(self, name: str, parse: Callable[[str], _T], *, least: float | None = None) -> _T:
        """A number with its unit: above 0, or at least `least`."""
        text = self.text(name)
        if text.strip().startswith("-"):
            raise self.fault_at(name, f"{text!r} is below 0", "Give it a positive number")
        try:
            value = parse(text)
        except ValueError as error:
            raise self.fault_at(name, str(error), "A number has its unit") from error
        if least is None and not value:
            raise self.fault_at(name, f"{text!r} is 0", "Give it a number above 0")
        return value

    def mapping(self, name: str) -> "Mapping":
        return Mapping(self.path, self._need(name), self._full(name))

    def mappings(self, name: str) -> list["Mapping"]:
        """A list of mappings, at least one."""
        node = self._need(name)
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self.fault(name, f"a list is needed, not {_shown(node)}", "Start each of its parts with '- '", node)
        return [Mapping(self.path, part, f"{self._full(name)}[{i}]") for i, part in enumerate(node.value)]

    def finish(self) -> None:
        """Raises for a key that nobody asked for."""
        for name, (node, _) in self._values.items():
            if name not in self._asked:
                near = did_you_mean(name, self._asked)
                known = ", ".join(dict.fromkeys(self._asked))
                raise self.fault(name, f"there is no such key{near}", f"Here are {known}", node)

    def _need(self, name: str) -> yaml.Node:
        if not self.has(name):
            unknown = [key for key in self._values if key not in self._asked]
            for misspelt in difflib.get_close_matches(name, unknown, n=1):
                problem = f"there is no such key (did you mean {name!r}?)"
                raise self.fault(misspelt, problem, "Rename it", self._values[misspelt][0])
            raise self.fault(name, "this key is missing", "Add it; see docs/clusters.md")
        return self._values[name][1]

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.key, name) if part)


def read_mapping(path: str, text: str) -> Mapping:
    """The mapping that a YAML text holds. Raises ClusterFileError for what is no YAML or no mapping."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ClusterFileError(path, line, "", f"it is no YAML ({error.problem})", "Mend that line") from error
    except yaml.YAMLError as error:
        problem = f"it is no YAML ({str(error).splitlines()[0]})"
        raise ClusterFileError(path, 1, "", problem, "Write it as text") from error
    if node is None:
        raise ClusterFileError(path, 1, "", "it is empty", "See docs/clusters.md for what goes in")
    return Mapping(path, node, "")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """' (did you mean ...?)' where a known word is close to this one, else ''."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"
