"""Small random profiles without torch: the golden profile's traces with other seconds, layers, links and operators."""

import dataclasses
import random

from osdp_ray.records.profile import FOREIGN, GroupKind, Operator, Profile, Section, SectionClass, SectionTrace
from tests.regenerate_golden import PROFILE

HOOKS = range(2, 6)  # ENTER, EXIT, PRE_BACKWARD, POST_BACKWARD
GROUPS: tuple[GroupKind, ...] = ("world", "node", "across")


def base_profile() -> Profile:
    """The golden profile: stem, one class of blocks, head."""
    return Profile.load(PROFILE)


def random_profile(
    rng: random.Random,
    *,
    max_layers: int,
    merge: bool,
    whole_blocks: bool = False,
    nodes: bool = False,
    splits: bool = False,
) -> Profile:
    """Seconds over two decades, links over three, 1 to `max_layers` blocks, 2 to 8 ranks.

    `merge` leaves the blocks two operators (`whole_blocks`: one) and stem and head one each, so that every plan can be
    enumerated. `nodes`: the ranks stand on two nodes of two. `splits`: the second operator of a merged block is its
    last Linear alone, which can be split. Every other profile communicates beside computation, some of the
    others reduce replicated gradients late.
    """
    profile = base_profile()
    if merge:
        profile = merged(profile, whole_blocks=whole_blocks, splits=splits)
    names = [f"blocks.{index}" for index in range(rng.randint(1, max_layers))]
    sections = (Section(name="stem", class_index=0), *(Section(name=n, class_index=1) for n in names))
    overlaps = rng.random() < 0.5
    return dataclasses.replace(
        profile,
        backend=profile.backend if overlaps else rng.choice((profile.backend, "gloo")),
        ranks_per_node=(2, 2) if nodes else (rng.choice((2, 3, 4, 8)),),
        overlaps=overlaps,
        overlap_slowdown_fraction=rng.choice((0.0, 0.25, 1.5)),
        sections=(*sections, Section(name="head", class_index=2)),
        compute=tuple(
            dataclasses.replace(
                cost,
                forward_constant_s=_log_uniform(rng, 1e-4, 1e-2),
                forward_s_per_sample=_log_uniform(rng, 1e-4, 1e-2),
                backward_constant_s=_log_uniform(rng, 1e-4, 1e-2),
                backward_s_per_sample=_log_uniform(rng, 1e-4, 1e-2),
            )
            for cost in profile.compute
        ),
        links=tuple(
            dataclasses.replace(
                link,
                group=group,
                latency_s=_log_uniform(rng, 1e-5, 1e-2),
                bytes_per_s=_log_uniform(rng, 1e7, 1e10),
            )
            for link in profile.links
            for group in (GROUPS if nodes else GROUPS[:1])
        ),
    )


def merged(profile: Profile, *, whole_blocks: bool = False, splits: bool = False) -> Profile:
    """Attention and MLP of a block become one operator each, or one together; so do all of stem and of head."""
    block = (range(6),) if whole_blocks else (range(5), range(5, 6)) if splits else (range(3), range(3, 6))
    groups = [((range(len(profile.classes[0].operators))),), block, (range(2),)]
    owners = [{old: new for new, olds in enumerate(rows) for old in olds} for rows in groups]
    classes = tuple(_merge_class(section, rows) for section, rows in zip(profile.classes, groups, strict=True))
    traces, evaluation = (
        tuple(_renumber(trace, owners) for trace in found) for found in (profile.traces, profile.evaluation)
    )
    return dataclasses.replace(profile, classes=classes, traces=traces, evaluation=evaluation)


def _merge_class(section_class: SectionClass, groups: tuple[range, ...]) -> SectionClass:
    operators = []
    for group in groups:
        members = [section_class.operators[index] for index in group]
        operators.append(
            Operator(
                name=members[0].name,
                kind="+".join(member.kind for member in members),
                modules=tuple(name for member in members for name in member.modules),
                parameters=tuple(index for member in members for index in member.parameters),
                buffer_bytes=sum(member.buffer_bytes for member in members),
                can_split=section_class.is_block and len(members) == 1,
            )
        )
    return dataclasses.replace(section_class, operators=tuple(operators))


def _renumber(trace: SectionTrace, owners: list[dict[int, int]]) -> SectionTrace:
    return dataclasses.replace(
        trace,
        forward=_renumbered(trace.forward, trace.class_index, owners),
        backward=_renumbered(trace.backward, trace.class_index, owners),
    )


def _renumbered(flat: tuple[int, ...], class_index: int, owners: list[dict[int, int]]) -> tuple[int, ...]:
    rows = list(flat)
    for i in range(0, len(rows), 5):
        subject = rows[i + 1]
        if rows[i] in HOOKS and subject >= FOREIGN:
            owner, index = divmod(subject, FOREIGN)
            rows[i + 1] = FOREIGN * owner + owners[owner - 1][index]
        elif rows[i] in HOOKS and subject >= 0:
            rows[i + 1] = owners[class_index][subject]
    return tuple(rows)


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return low * (high / low) ** rng.random()
