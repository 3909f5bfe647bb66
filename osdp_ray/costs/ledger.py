"""Who holds the memory at the highest moment of each phase.

A Ledger plays the same step as the simulator and, whenever a phase reaches a new height, notes what the live bytes are:
held always, gathered parameters, gradients, buffers of collectives, the batch, and per section its activations.
"""

import dataclasses

from osdp_ray.costs.levels import PHASES
from osdp_ray.costs.memory import StepSimulator
from osdp_ray.costs.programs import EVALUATION
from osdp_ray.costs.starting import starting_shares
from osdp_ray.costs.steps import persistent_bytes, play_evaluation, play_step, state_bytes
from osdp_ray.records.plan import Plan, SectionPlan, Synchronise
from osdp_ray.records.profile import Profile
from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holding:
    """One holder at the peak of a phase. `where` names a section, '' where it is no section's."""

    kind: str
    where: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The peak of one phase: the section that ran then, and what held the bytes, the largest first."""

    phase: str
    section: str
    peak_bytes: int
    holdings: tuple[Holding, ...]


def explain_peaks(profile: Profile, plan: Plan) -> tuple[PhasePeak, ...]:
    """The peaks of all phases of a plan, in their order."""
    noted = explain_section_peaks(
        profile,
        plan.sections,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        synchronise=plan.synchronise,
        prefetch=plan.prefetch,
    )
    if not profile.evaluation:
        return noted
    ledger = _Ledger(profile, plan.sections, plan.micro_batch)
    play_evaluation(ledger, plan.micro_batch)
    return (*noted, ledger.noted[EVALUATION])


def explain_section_peaks(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int,
    synchronise: Synchronise = "every",
    prefetch: int | None = None,
) -> tuple[PhasePeak, ...]:
    """The same of the start and a step, for decisions that are not in a plan yet."""
    ledger = _Ledger(profile, sections, micro_batch, prefetch)
    shares_of = starting_shares(ledger, state_bytes(ledger))
    starting = tuple(_starting_peak(phase, shares) for phase, shares in shares_of.items())
    play_step(ledger, micro_batch, accumulation, synchronise)
    return (*starting, *(ledger.noted[phase] for phase in PHASES if phase in ledger.noted))


def _starting_peak(phase: str, shares: dict[str, int]) -> PhasePeak:
    holdings = [Holding(kind=kind, where="", num_bytes=num_bytes) for kind, num_bytes in shares.items() if num_bytes]
    ordered = sorted(holdings, key=lambda holding: -holding.num_bytes)
    return PhasePeak(phase=phase, section="", peak_bytes=sum(shares.values()), holdings=tuple(ordered))


def peak_table(peaks: tuple[PhasePeak, ...], budget_bytes: int, *, num_holdings: int = 6) -> str:
    """The peaks for a terminal, the highest phase marked, each with its largest holders."""
    highest = max(peaks, key=lambda peak: peak.peak_bytes)
    rows = []
    for peak in peaks:
        mark = " <- peak" if peak is highest else ""
        rows.append((f"{peak.phase}{mark}", peak.section, format_bytes(peak.peak_bytes), ""))
        shown = peak.holdings[:num_holdings]
        rest = sum(holding.num_bytes for holding in peak.holdings[num_holdings:])
        for holding in shown:
            share = f"{100 * holding.num_bytes / peak.peak_bytes:.1f} %"
            rows.append((f"  {holding.kind}", holding.where, format_bytes(holding.num_bytes), share))
        if rest:
            rows.append(("  the rest", "", format_bytes(rest), f"{100 * rest / peak.peak_bytes:.1f} %"))
    table = format_table(("phase / what is held", "section", "bytes", "share"), rows)
    return f"{table}\n\nbudget {format_bytes(budget_bytes)}, peak {format_bytes(highest.peak_bytes)}"


class _Ledger(StepSimulator):
    """Attributes every change of `live` that comes from a section's own events to that section."""

    def __init__(
        self, profile: Profile, sections: tuple[SectionPlan, ...], micro_batch: int, prefetch: int | None = None
    ) -> None:
        self.noted: dict[str, PhasePeak] = {}
        self.activations: dict[int, int] = {}
        self.position = -1
        self.persistent = self.momentary = 0
        self.batch_bytes = micro_batch * profile.batch_bytes_per_sample
        self._peak = 0
        class_indices = tuple(section.class_index for section in profile.sections)
        super().__init__(profile, sections, class_indices, prefetch=prefetch)
        self.persistent = persistent_bytes(self)

    @property
    def peak(self) -> int:
        return self._peak

    @peak.setter
    def peak(self, value: int) -> None:
        self._peak = value
        known = self.noted.get(getattr(self, "phase", "forward"))
        if self.persistent and (known is None or value > known.peak_bytes):
            self.noted[self.phase] = self._note(value)

    def _play(self, position: int, micro_batch: int):  # type: ignore[no-untyped-def]
        self.position = position
        return super()._play(position, micro_batch)

    def _run(self, net: int, peak: int) -> None:
        self.activations[self.position] = self.activations.get(self.position, 0) + net
        super()._run(net, peak)

    def _touch(self, num_bytes: int) -> None:
        self.momentary = num_bytes
        super()._touch(num_bytes)
        self.momentary = 0

    def _note(self, peak_bytes: int) -> PhasePeak:
        holdings = [Holding(kind="held always", where="", num_bytes=self.persistent)]
        holdings.append(Holding(kind="copies of a moment", where="", num_bytes=self.momentary))
        live = self.persistent + self.momentary
        for position, units in enumerate(self.units):
            name = self.sections[position].name
            for kind, num_bytes in (
                ("gathered parameters", sum(u.sizes.gathered_bytes for u in units if u.gathered)),
                ("parameters kept for the node", sum(u.sizes.node_shard_bytes for u in units if u.has_node_shard)),
                ("gradients to be reduced", sum(u.gradient_bytes + u.full_gradient_bytes for u in units)),
                ("reduced gradients", sum(u.sizes.gradient_bytes for u in units if u.has_shard_gradient)),
            ):
                live += num_bytes
                holdings.append(Holding(kind=kind, where=name, num_bytes=num_bytes))
        collectives = self.held_flat + self.pending_bytes + self.reduce_input + self.reduced_bytes
        holdings.append(Holding(kind="buffers of collectives", where="", num_bytes=collectives))
        live += collectives
        rest = max(0, peak_bytes - live)
        saved = {p: n for p, n in self.activations.items() if n > 0}
        total = sum(saved.values()) or 1
        for position, num_bytes in saved.items():  # gradients and outputs change hands: shares are scaled to the rest
            where = self.sections[position].name
            holdings.append(Holding(kind="activations", where=where, num_bytes=rest * num_bytes // total))
        name = self.sections[self.position].name if self.phase != "optimizer" else ""
        ordered = sorted((h for h in holdings if h.num_bytes), key=lambda holding: -holding.num_bytes)
        return PhasePeak(phase=self.phase, section=name, peak_bytes=peak_bytes, holdings=tuple(ordered))
