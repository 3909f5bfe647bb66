"""The package reads in one direction, and planning needs neither torch nor ray."""

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import osdp_ray

PACKAGE = Path(osdp_ray.__file__).parent
MAX_LINES = 400

# Parts from the lowest to the highest. A part imports itself and lower ones; parts of a SIBLINGS row also one another.
STAGES = ("discovery", "profiling", "planning", "execution", "observation", "replanning")
PIPELINE = ("pipeline", "settings", "attempt", "run_directory", "resuming", "signals")
OUTERMOST = ("tune", "reporting", "cli")
LEVELS = (
    ("units",),
    ("errors",),
    ("schema", "blame"),
    ("records",),
    ("workload", "costs", "catalogue"),
    ("modeling", "workloads"),
    STAGES,
    PIPELINE,
    OUTERMOST,
)
SIBLINGS = (PIPELINE, OUTERMOST)
SAME_PART = {"tune_cells": "tune", "cli_flags": "cli"}  # files that were split off a part
HEAVY = {
    "torch": ("modeling", "profiling", "execution", "observation", "workloads"),
    "ray": ("discovery", "profiling", "execution", "observation", *PIPELINE, "tune", "cli"),
    "pulp": ("planning",),
    "highspy": ("planning",),
}
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}


@dataclasses.dataclass(frozen=True)
class Import:
    """`module` (dotted) is imported by `source` (dotted, without the package's name) in a line."""

    source: str
    module: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.module}"


def part_of(dotted: str) -> str:
    first = dotted.partition(".")[0]
    return SAME_PART.get(first, first)


def imports_of(source: str, text: str) -> list[Import]:
    """Every import of a module's text, those in functions too; what only type checkers see loads nothing."""
    found = []
    for node in _loaded_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [Import(source, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append(Import(source, "." * node.level + (node.module or ""), node.lineno))
        elif isinstance(node, ast.ImportFrom) and node.module == "osdp_ray":
            found += [Import(source, f"osdp_ray.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(Import(source, node.module or "", node.lineno))
    return found


def _loaded_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _loaded_nodes(other)
            continue
        yield child
        yield from _loaded_nodes(child)


def broken_direction(imports: list[Import]) -> list[str]:
    """Imports within the package that do not point downwards."""
    broken = []
    for found in imports:
        if found.module.startswith("."):
            broken.append(f"{found}: name the module in full")
            continue
        package, _, target = found.module.partition(".")
        if package != "osdp_ray":
            continue
        if not target:
            broken.append(f"{found}: the package imports its parts, not the other way round")
            continue
        above, below = part_of(found.source), part_of(target)
        if below not in LEVEL_OF:
            broken.append(f"{found}: {below!r} has no level")
        elif above != below and LEVEL_OF[below] >= LEVEL_OF[above] and not _siblings(above, below):
            broken.append(str(found))
    return broken


def _siblings(one: str, other: str) -> bool:
    return any(one in row and other in row for row in SIBLINGS)


def broken_loading(imports: list[Import]) -> list[str]:
    """Imports of heavy libraries in parts that must do without."""
    broken = []
    for found in imports:
        allowed = HEAVY.get(found.module.partition(".")[0])
        if allowed is not None and part_of(found.source) not in allowed:
            broken.append(str(found))
    return broken


def mutual(imports: list[Import]) -> list[tuple[str, str]]:
    """Pairs of parts that import each other, directly or through others."""
    edges: dict[str, set[str]] = {}
    for found in imports:
        package, _, target = found.module.partition(".")
        if package == "osdp_ray" and target and part_of(target) != part_of(found.source):
            edges.setdefault(part_of(found.source), set()).add(part_of(target))
    reached = {part: _reach(part, edges) for part in edges}
    return sorted(
        (one, other) for one in reached for other in reached[one] if one < other and one in reached.get(other, ())
    )


def _reach(part: str, edges: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [part]
    while waiting:
        for target in edges.get(waiting.pop(), ()):
            if target not in reached:
                reached.add(target)
                waiting.append(target)
    return reached


def texts() -> dict[str, str]:
    """Dotted name (without the package's) -> text of every module but the package's own `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path.read_text(encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [found for name, text in texts().items() for found in imports_of(name, text)]


def test_every_module_has_a_place_in_the_order():
    assert sorted({part_of(name) for name in texts()} - set(LEVEL_OF)) == []


def test_imports_point_downwards_and_stages_never_import_each_other(imports):
    assert broken_direction(imports) == []


def test_no_two_parts_import_each_other(imports):
    assert mutual(imports) == []


def test_torch_ray_and_the_solvers_are_imported_only_where_they_belong(imports):
    assert broken_loading(imports) == []


def test_the_package_itself_imports_no_part_when_it_is_imported():
    found = imports_of("", (PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert [str(item) for item in found if item.module.partition(".")[0] in ("osdp_ray", *HEAVY)] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_says_what_it_is_stays_short_and_never_prints(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    is_marker = path.name == "__init__.py" and not text
    assert ast.get_docstring(tree) or is_marker, "it has no docstring"
    assert len(text.splitlines()) <= MAX_LINES
    assert [call.lineno for call in calls if call.func.id == "print"] == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("planning.menus", "from osdp_ray.execution import apply"),
        ("units", "from osdp_ray.errors import OsdpError"),
        ("errors", "def f():\n    from osdp_ray import schema"),
        ("costs.memory", "import osdp_ray.planning.solve"),
        ("profiling", "from osdp_ray.pipeline import run"),
        ("pipeline", "from osdp_ray.cli import main"),
        ("records.plan", "from . import profile"),
        ("schema", "import osdp_ray"),
        ("replanning", "from osdp_ray.new_part import anything"),
    ],
)
def test_the_check_of_directions_sees_an_upward_sideways_relative_or_unknown_import(source, text):
    assert len(broken_direction(imports_of(source, text))) == 1


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("costs.memory", "import torch.nn as nn"),
        ("planning", "def late():\n    from ray.train import report"),
        ("replanning", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("reporting.html", "import ray"),
        ("costs.seconds", "import pulp"),
    ],
)
def test_the_check_of_heavy_libraries_sees_every_way_to_import_them(source, text):
    assert len(broken_loading(imports_of(source, text))) == 1


def test_what_only_type_checkers_import_counts_for_nothing_and_its_else_counts():
    text = "if TYPE_CHECKING:\n    import torch\n    from osdp_ray.cli import main\nelse:\n    import ray\n"
    assert [item.module for item in imports_of("costs", text)] == ["ray"]


def test_the_check_of_mutual_imports_sees_a_ring_of_three():
    ring = [
        Import("tune", "osdp_ray.cli", 1),
        Import("cli", "osdp_ray.reporting.html", 1),
        Import("reporting.plots", "osdp_ray.tune", 1),
    ]
    assert mutual(ring) == [("cli", "reporting"), ("cli", "tune"), ("reporting", "tune")]
    assert mutual(ring[:2]) == []


def test_importing_the_package_and_planning_from_a_profile_load_neither_torch_nor_ray():
    profile = Path(__file__).parent.parent / "golden" / "profile-gpt-4x128.json"
    script = (
        "import sys, osdp_ray\n"
        "first = {'torch', 'ray', 'pulp', 'numpy'} & set(sys.modules)\n"
        f"profile = osdp_ray.Profile.load({str(profile)!r})\n"
        "plan = osdp_ray.plan(profile, budget_bytes=1 << 30, global_batch=16)\n"
        "assert osdp_ray.predict(profile, plan).peak_bytes == plan.prediction.peak_bytes\n"
        "later = {'torch', 'ray'} & set(sys.modules)\n"
        "assert not first and not later, (first, later)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves_and_no_other_does():
    names = {
        *("Workload", "discover", "profile", "plan", "predict", "parallelize", "execute", "recalibrate", "run"),
        *("Cluster", "Profile", "Plan", "Prediction", "Telemetry", "Sample", "OsdpError"),
    }
    assert set(osdp_ray.__all__) == names
    assert {name for name in names if getattr(osdp_ray, name) is not None} == names
    with pytest.raises(AttributeError, match="no attribute 'paln'"):
        osdp_ray.paln  # noqa: B018
    from osdp_ray.tune import sweep

    assert callable(sweep)
