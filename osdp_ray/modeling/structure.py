"""What a model is made of: its repeating blocks, its operators, and classes of blocks that are alike.

In goes a model (meta or fake); out comes a Structure. An operator is a module that owns parameters. Operators outside
blocks are put into 'stem' (run before the first block) or 'head' (run after it) by the order in which they ran.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from osdp_ray.errors import TraceError
from osdp_ray.modeling.splitting import is_splittable
from osdp_ray.records.profile import Operator, Parameter, Section, SectionClass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    """Sections in the order of execution, and their classes."""

    sections: tuple[Section, ...]
    classes: tuple[SectionClass, ...]

    def members(self, class_index: int) -> tuple[str, ...]:
        return tuple(section.name for section in self.sections if section.class_index == class_index)


def find_blocks(model: nn.Module, lists: Iterable[str] | None) -> tuple[str, ...]:
    """Paths of the repeating blocks: the children of the named lists, or of every list of alike layers.

    A list counts if it is a ModuleList, ModuleDict or Sequential of at least two children that own parameters, at
    least two of them alike, and it does not lie inside another block.
    """
    if lists is not None:
        names = []
        for path in lists:
            try:
                children = model.get_submodule(path)
            except AttributeError as error:
                raise TraceError(
                    path,
                    "the workload's blocks name it and the model has no such module",
                    "Name the paths of lists of layers, such as 'transformer.h'",
                ) from error
            names += [f"{path}.{name}" for name, _ in children.named_children()]
        return tuple(names)
    found: list[str] = []
    _search_blocks("", model, found)
    return tuple(found)


def _search_blocks(path: str, module: nn.Module, found: list[str]) -> None:
    children = list(module.named_children())
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        signatures = [signature(child) for _, child in children if any(True for _ in child.parameters())]
        if len(signatures) >= 2 and len(set(signatures)) < len(signatures):
            found += [f"{path}.{name}" if path else name for name, _ in children]
            return
    for name, child in children:
        _search_blocks(f"{path}.{name}" if path else name, child, found)


def signature(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules of the same structure: module types, shapes, dtypes, requires_grad, buffers."""
    parts: list[object] = []
    for name, child in module.named_modules():
        parts.append((name, type(child).__qualname__, child.extra_repr()))
        for key, parameter in child._parameters.items():
            if parameter is not None:
                parts.append((key, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad))
        for key, buffer in child._buffers.items():
            if buffer is not None:
                parts.append((key, tuple(buffer.shape), str(buffer.dtype)))
    return tuple(parts)


def kinds_of(model: nn.Module, blocks: Iterable[str]) -> dict[str, int]:
    """Block -> a number, the same for blocks of the same structure."""
    numbers: dict[tuple[object, ...], int] = {}
    return {name: numbers.setdefault(signature(model.get_submodule(name)), len(numbers)) for name in blocks}


def is_within(name: str, paths: Collection[str]) -> bool:
    """Whether a module lies inside one of these; one of them does not lie inside itself."""
    return _around(name, paths) != ""


def _around(name: str, paths: Collection[str]) -> str:
    """Which of these a module lies inside, '' where it is none."""
    end = name.rfind(".")
    while end > 0:
        if name[:end] in paths:
            return name[:end]
        end = name.rfind(".", 0, end)
    return ""


def build_structure(
    model: nn.Module,
    blocks: tuple[str, ...],
    order: list[str],
    variants: Mapping[str, int] | None = None,
    kinds: Mapping[str, int] | None = None,
    read: Collection[str] = (),
) -> Structure:
    """The structure of a model whose operators and blocks ran in `order` (paths, at their first entry).

    What never runs by itself (the output projection of nn.MultiheadAttention, a ParameterList) has no moment to be
    gathered at: its parameters belong to the operator of the nearest module around it that does run.
    Blocks of the same structure share a class, unless `variants` gives them different numbers. `kinds` are those of
    `kinds_of`, where they are known. Operators in `read` have weights that others read, so that they cannot be split.
    """
    kinds = kinds or kinds_of(model, blocks)
    position = {name: index for index, name in reversed(list(enumerate(order)))}
    ran_blocks = sorted((name for name in blocks if name in position), key=position.__getitem__)
    first_block = position[ran_blocks[0]] if ran_blocks else len(order)
    homes = _homes(model, blocks, position)
    known = frozenset(blocks)
    outside = [name for name in homes if name not in known and not is_within(name, known)]
    groups = _tied(model, outside, homes)
    stem = [
        group for group in groups if min(position.get(name, len(order)) for name in group) < first_block or "" in group
    ]
    head = [group for group in groups if group not in stem]

    inside = {name[len(_around(name, known)) + 1 :] for name in read if is_within(name, known)}

    def describe(name: str, prefix: str, groups: list[tuple[str, ...]], *, is_block: bool) -> SectionClass:
        return _class(model, name, prefix, groups, homes, inside if is_block else read, is_block=is_block)

    classes: list[SectionClass] = [describe("stem", "", stem, is_block=False)]
    sections: list[Section] = [Section(name="stem", class_index=0)]
    seen: dict[tuple[int, int | None], int] = {}
    for name in ran_blocks:
        key = (kinds[name], (variants or {}).get(name))
        if key not in seen:
            seen[key] = len(classes)
            block = model.get_submodule(name)
            owners = [owner for owner in homes if owner == name or owner.startswith(f"{name}.")]
            groups = _tied(model, owners, homes)
            classes.append(describe(type(block).__name__, name, groups, is_block=True))
        sections.append(Section(name=name, class_index=seen[key]))
    classes.append(describe("head", "", head, is_block=False))
    sections.append(Section(name="head", class_index=len(classes) - 1))
    return Structure(sections=tuple(sections), classes=tuple(classes))


def with_scratch(structure: Structure, scratch_bytes: Mapping[str, int]) -> Structure:
    """The structure with what drawing the first values of its parameters holds, by their full names."""
    if not any(scratch_bytes.values()):
        return structure
    classes = []
    for class_index, section_class in enumerate(structure.classes):
        prefix = f"{structure.members(class_index)[0]}." if section_class.is_block else ""
        parameters = tuple(
            dataclasses.replace(parameter, scratch_bytes=scratch_bytes.get(f"{prefix}{parameter.name}", 0))
            for parameter in section_class.parameters
        )
        classes.append(dataclasses.replace(section_class, parameters=parameters))
    return dataclasses.replace(structure, classes=tuple(classes))


def _owners(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if any(p is not None for p in child._parameters.values())]


def _homes(model: nn.Module, blocks: tuple[str, ...], ran: Collection[str]) -> dict[str, list[str]]:
    """Modules that are gathered -> those whose parameters they gather, themselves first; in the model's order."""
    homes: dict[str, list[str]] = {}
    known = frozenset(blocks)
    played = {_around(name, known) for name in ran}
    for owner in _owners(model):
        block, home = _around(owner, known), owner
        if not block or block in played:  # else a block that others stand for
            while home not in ran and home != block:
                home = home.rpartition(".")[0]
        homes.setdefault(home, []).append(owner)
    return homes


def _tied(model: nn.Module, owners: list[str], homes: Mapping[str, list[str]]) -> list[tuple[str, ...]]:
    """Owners that share a parameter, directly or through others, in one group each; in the order given."""
    groups: list[list[str]] = []
    holders: dict[int, list[str]] = {}
    for name in owners:
        group = [name]
        for parameter in (p for path in homes[name] for p in model.get_submodule(path).parameters(recurse=False)):
            other = holders.get(id(parameter))
            if other is not None and other is not group:
                other += [item for item in group if item not in other]
                if group in groups:
                    groups.remove(group)
                for key, holder in holders.items():
                    if holder is group:
                        holders[key] = other
                group = other
            holders[id(parameter)] = group
        if group not in groups:
            groups.append(group)
    return [tuple(group) for group in groups]


def _class(
    model: nn.Module,
    name: str,
    prefix: str,
    groups: list[tuple[str, ...]],
    homes: Mapping[str, list[str]],
    read: Collection[str],
    *,
    is_block: bool,
) -> SectionClass:
    cut = len(prefix) + 1 if prefix else 0
    parameters: list[Parameter] = []
    index_of: dict[int, int] = {}
    operators = []
    for group in groups:
        indices = []
        buffer_bytes = 0
        for path in (owner for home in group for owner in homes[home]):
            module = model.get_submodule(path)
            buffer_bytes += sum(buffer.nbytes for buffer in module.buffers(recurse=False))
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in index_of:
                    continue
                index_of[id(parameter)] = len(parameters)
                indices.append(len(parameters))
                relative = path[cut:]
                parameters.append(
                    Parameter(
                        name=f"{relative}.{key}" if relative else key,
                        shape=tuple(parameter.shape),
                        itemsize_bytes=parameter.element_size(),
                        requires_grad=parameter.requires_grad,
                    )
                )
        names = tuple(path[cut:] for path in group)
        operators.append(
            Operator(
                name=names[0],
                kind=type(model.get_submodule(group[0])).__name__,
                modules=names,
                parameters=tuple(indices),
                buffer_bytes=buffer_bytes,
                can_split=len(names) == 1 and names[0] not in read and is_splittable(model.get_submodule(group[0])),
            )
        )
    return SectionClass(name=name, is_block=is_block, operators=tuple(operators), parameters=tuple(parameters))
