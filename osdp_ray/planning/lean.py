"""Where nothing fits: the lowest peak that any plan has, what binds there, and what helps."""

from osdp_ray.costs import explain_section_peaks, simulate_sections
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning.choices import RECOMPUTES, choices_of, uniform_sections
from osdp_ray.planning.costing import objective
from osdp_ray.planning.cuts import add_cuts
from osdp_ray.planning.layout import build_layout, compute_s
from osdp_ray.planning.menus import StepShape
from osdp_ray.planning.program import Program
from osdp_ray.planning.relaxation import relax
from osdp_ray.planning.search import Candidate, as_words, candidate, largest_operator
from osdp_ray.records.profile import Profile

_NUM_COLUMNS = 60
_CLOSE_FRACTION = 0.002
_MAX_SOLVES = 60


def infeasible(profile: Profile, shapes: list[StepShape], budget_bytes: int) -> InfeasibleError:
    """The error with the smallest budget that fits: that of the leanest plan at the smallest micro-batch."""
    smallest = min(shape.micro_batch for shape in shapes)
    lean = min(
        (leanest(profile, shape) for shape in shapes if shape.micro_batch == smallest),
        key=lambda found: found.prediction.peak_bytes,
    )
    peaks = explain_section_peaks(profile, lean.sections, **as_words(lean.shape))
    peak = max(peaks, key=lambda found: found.peak_bytes)
    holder = largest_operator(profile, peak.section)
    return InfeasibleError(budget_bytes, lean.prediction.device_bytes, peak.phase, holder, smallest)


def leanest(profile: Profile, shape: StepShape) -> Candidate:
    """The plan with the lowest peak at a step shape, of the program's and the uniform ones."""
    best = min(
        (
            candidate(profile, uniform_sections(profile, choice, recompute), shape)
            for choice in choices_of(profile)
            for recompute in RECOMPUTES
        ),
        key=lambda found: found.prediction.peak_bytes,
    )
    layout = build_layout(profile, shape)
    scale_bytes, scale_s = best.prediction.peak_bytes, max(compute_s(profile, shape), 1e-12)
    relaxation = relax(layout, budget_bytes=None, scale_bytes=scale_bytes, scale_s=scale_s)
    if relaxation is None:
        return best
    room = best.prediction.peak_bytes - relaxation.bound
    columns, _ = relaxation.nearest([_NUM_COLUMNS] * len(layout.slots), max(room, 0.0))
    program = Program(
        layout,
        columns,
        objective(layout, is_bound=False),
        budget_bytes=None,
        scale_bytes=scale_bytes,
        scale_s=scale_s,
        is_relaxed=False,
    )
    for _ in range(_MAX_SOLVES):
        solution = program.solve(gap_fraction=1e-3, max_nodes=500)
        if solution is None:
            break
        places = layout.places(solution.counts)
        sections = layout.written_out(places)
        held = simulate_sections(profile, sections, **as_words(shape))
        if held.peak_bytes < best.prediction.peak_bytes:
            best = candidate(profile, sections, shape)
        close_bytes = round(solution.value * (1 + _CLOSE_FRACTION))
        if best.prediction.peak_bytes <= close_bytes or not add_cuts(program, places, held, close_bytes):
            break
    return best
