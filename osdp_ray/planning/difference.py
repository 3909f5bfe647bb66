"""What differs between two plans, in words and figures."""

import dataclasses
import itertools
from collections.abc import Callable

from osdp_ray.records.plan import Plan, SectionPlan, short_names
from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two plans do or cost differently."""

    what: str
    before: str
    after: str
    change: str


def differences(one: Plan, other: Plan) -> tuple[Difference, ...]:
    """From the first plan to the second; nothing where they do and cost the same."""
    found = [*_settings(one, other), *_sections(one, other), *_figures(one, other)]
    return tuple(difference for difference in found if difference.before != difference.after)


def difference_table(found: tuple[Difference, ...]) -> str:
    """The differences for a terminal."""
    if not found:
        return "the plans are the same"
    rows = [(item.what, item.before, item.after, item.change) for item in found]
    return format_table(("what", "first", "second", "change"), rows)


def _settings(one: Plan, other: Plan) -> list[Difference]:
    names = {
        "workload": "workload",
        "workload_hash": "workload's hash",
        "num_ranks": "ranks",
        "precision": "precision",
        "global_batch": "global batch",
        "micro_batch": "micro-batch",
        "accumulation": "accumulation",
        "synchronise": "micro-batches that synchronise",
        "prefetch": "units gathered ahead",
        "scatter_group": "group that reduces",
    }
    found = [
        Difference(what=words, before=str(getattr(one, name)), after=str(getattr(other, name)), change="")
        for name, words in names.items()
    ]
    before, after = one.budget_bytes, other.budget_bytes
    change = _signed(after - before, format_bytes)
    budget = Difference(what="budget", before=format_bytes(before), after=format_bytes(after), change=change)
    return [*found, budget]


def _sections(one: Plan, other: Plan) -> list[Difference]:
    """Runs of neighbouring sections that change alike."""
    names = [section.name for section in one.sections]
    if names != [section.name for section in other.sections]:
        return [
            Difference(what="sections", before=str(len(names)), after=str(len(other.sections)), change="another model")
        ]
    found = []
    pairs = zip(one.sections, other.sections, strict=True)
    for key, group in itertools.groupby(pairs, key=lambda pair: (_does(pair[0]), _does(pair[1]))):
        run = [pair[0].name for pair in group]
        what = run[0] if len(run) == 1 else f"{run[0]} .. {run[-1]}"
        sections = "1 section" if len(run) == 1 else f"{len(run)} sections"
        found.append(Difference(what=what, before=key[0], after=key[1], change=sections))
    return found


def _does(section: SectionPlan) -> str:
    """What a section does, operator by operator where they differ."""
    if len(section.units) < 2:
        return section.label
    units = [f"{choice.label} ({_short(short_names(operators))})" for choice, operators in section.units_alike()]
    recompute = "" if section.recompute == "none" else f", recompute {section.recompute}"
    return " + ".join(units) + recompute


def _short(operators: tuple[str, ...]) -> str:
    return ", ".join(operators) if len(operators) < 3 else f"{operators[0]} and {len(operators) - 1} more"


def _figures(one: Plan, other: Plan) -> list[Difference]:
    before, after = one.prediction, other.prediction
    found = [
        Difference(
            what="predicted peak",
            before=format_bytes(before.peak_bytes),
            after=format_bytes(after.peak_bytes),
            change=_signed(after.peak_bytes - before.peak_bytes, format_bytes),
        ),
        Difference(
            what="predicted step",
            before=format_seconds(before.step_s),
            after=format_seconds(after.step_s),
            change=_signed(after.step_s - before.step_s, format_seconds),
        ),
    ]
    for phase in before.step_s_by_phase:
        seconds = before.step_s_by_phase[phase], after.step_s_by_phase.get(phase, 0.0)
        found.append(
            Difference(
                what=f"  {phase}",
                before=format_seconds(seconds[0]),
                after=format_seconds(seconds[1]),
                change=_signed(seconds[1] - seconds[0], format_seconds),
            )
        )
    found.append(
        Difference(
            what="predicted samples/s",
            before=f"{before.samples_per_s:.1f}",
            after=f"{after.samples_per_s:.1f}",
            change=f"{(after.samples_per_s / before.samples_per_s - 1) * 100:+.1f} %",
        )
    )
    return found


def _signed(value: float, form: Callable[[float], str]) -> str:
    return f"-{form(-value)}" if value < 0 else f"+{form(value)}"
