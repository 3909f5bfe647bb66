"""An explanation for a terminal."""

from osdp_ray.planning.explain import Explanation, Step
from osdp_ray.records.plan import Plan
from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes, format_percent, format_seconds


def explanation_table(plan: Plan, explanation: Explanation) -> str:
    """Why a plan is as it is; the last lines say what is proven."""
    rows = [
        (
            reason.sections,
            str(reason.num_sections),
            _short(reason.subject),
            reason.decision,
            _step(reason.wanted),
            _step(reason.next_best),
        )
        for reason in explanation.reasons
    ]
    header = ("section", "count", "what", "decision", "faster, but does not fit", "next best that fits, in one section")
    lines = [format_table(header, rows), "", *binding_lines(plan, explanation), "", alternatives_table(plan)]
    return "\n".join(lines)


def binding_lines(plan: Plan, explanation: Explanation) -> list[str]:
    """What binds, what memory is worth, and what is proven."""
    saved = explanation.saved_s_per_gib
    where = f" while {explanation.binding_section} runs" if explanation.binding_section else ""
    return [
        f"memory: the {explanation.binding_phase} phase is the highest{where}, {explanation.binding_operator} is its "
        f"largest operator; {format_bytes(explanation.free_bytes)} of {format_bytes(plan.budget_bytes)} stay free",
        f"seconds: {_spent(explanation.binding_resource)}",
        f"{format_bytes(explanation.more_memory_bytes)} more would take {format_seconds(explanation.saved_s)} off a "
        f"step ({saved * 1e3:.3f} ms per GiB)",
        f"no plan of this batch takes less than {format_seconds(explanation.floor_s)}: computing "
        f"{format_seconds(explanation.compute_floor_s)}, links {format_seconds(explanation.link_floor_s)}; this one "
        f"takes {format_seconds(plan.prediction.step_s)}",
        proof_line(plan),
    ]


def proof_line(plan: Plan) -> str:
    """What the solver proved."""
    if plan.solver.status == "optimal":
        return "proven: nothing in the menu is faster"
    return f"proven: nothing in the menu is more than {format_percent(plan.solver.gap_fraction)} faster"


def alternatives_table(plan: Plan) -> str:
    """The uniform settings beside the plan."""
    return plan.table().rpartition("\n\n")[2] if plan.alternatives else ""


def _spent(resource: str) -> str:
    words = {
        "compute": "computing binds; links are hidden or short",
        "link": "the links bind: most of the step waits for them",
        "both": "computing and what it does not hide of the links",
    }
    return words[resource]


def _short(names: str) -> str:
    first, *others = names.split(", ")
    return names if len(others) < 2 else f"{first} and {len(others)} more"


def _step(step: Step | None) -> str:
    if step is None:
        return "-"
    seconds = f"{'+' if step.more_s >= 0 else '-'}{format_seconds(abs(step.more_s))}"
    held = f"{'+' if step.more_bytes >= 0 else '-'}{format_bytes(abs(step.more_bytes))}"
    return f"{step.change}: {seconds}, {held}"
