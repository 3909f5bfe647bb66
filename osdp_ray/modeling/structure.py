"""What a model is made of: its repeating blocks, its operators, and classes of blocks that are alike.

In goes a model (meta or fake); out comes a Structure. An operator is a module that owns parameters. Operators outside
blocks are put into 'stem' (run before the first block) or 'head' (run after it) by the order in which they ran.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from osdp_ray.errors import TraceError
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
    end = name.rfind(".")
    while end > 0:
        if name[:end] in paths:
            return True
        end = name.rfind(".", 0, end)
    return False


def build_structure(
    model: nn.Module,
    blocks: tuple[str, ...],
    order: list[str],
    variants: Mapping[str, int] | None = None,
    kinds: Mapping[str, int] | None = None,
) -> Structure:
    """The structure of a model whose operators and blocks ran in `order` (paths, at their first entry).

    Blocks of the same structure share a class, unless `variants` gives them different numbers. `kinds` are those of
    `kinds_of`, where they are known.
    """
    kinds = kinds or kinds_of(model, blocks)
    position = {name: index for index, name in reversed(list(enumerate(order)))}
    ran_blocks = sorted((name for name in blocks if name in position), key=position.__getitem__)
    first_block = position[ran_blocks[0]] if ran_blocks else len(order)
    inside = frozenset(blocks)
    outside = [name for name in _owners(model) if name not in inside and not is_within(name, inside)]
    groups = _tied(model, outside)
    stem = [
        group for group in groups if min(position.get(name, len(order)) for name in group) < first_block or "" in group
    ]
    head = [group for group in groups if group not in stem]

    classes: list[SectionClass] = [_class(model, "stem", "", stem, is_block=False)]
    sections: list[Section] = [Section(name="stem", class_index=0)]
    seen: dict[tuple[int, int | None], int] = {}
    for name in ran_blocks:
        key = (kinds[name], (variants or {}).get(name))
        if key not in seen:
            seen[key] = len(classes)
            block = model.get_submodule(name)
            owners = [f"{name}.{owner}" if owner else name for owner in _owners(block)]
            classes.append(_class(model, type(block).__name__, name, _tied(model, owners), is_block=True))
        sections.append(Section(name=name, class_index=seen[key]))
    classes.append(_class(model, "head", "", head, is_block=False))
    sections.append(Section(name="head", class_index=len(classes) - 1))
    return Structure(sections=tuple(sections), classes=tuple(classes))


def _owners(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if any(p is not None for p in child._parameters.values())]


def _tied(model: nn.Module, owners: list[str]) -> list[tuple[str, ...]]:
    """Owners that share a parameter, directly or through others, in one group each; in the order given."""
    groups: list[list[str]] = []
    holders: dict[int, list[str]] = {}
    for name in owners:
        group = [name]
        for parameter in model.get_submodule(name).parameters(recurse=False):
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


def _class(model: nn.Module, name: str, prefix: str, groups: list[tuple[str, ...]], *, is_block: bool) -> SectionClass:
    cut = len(prefix) + 1 if prefix else 0
    parameters: list[Parameter] = []
    index_of: dict[int, int] = {}
    operators = []
    for group in groups:
        indices = []
        buffer_bytes = 0
        for path in group:
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
            )
        )
    return SectionClass(name=name, is_block=is_block, operators=tuple(operators), parameters=tuple(parameters))
