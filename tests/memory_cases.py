"""Random cases of memory: a model, a plan and a step's options, the same for the property test and the benchmark.

`draw_cases(N, seed)` names N cases without touching a model, `build_case` makes one's workload, profile and plan. Every
field is dealt like cards, each value once before any comes again, so that a few dozen cases cover all of them.
"""

import dataclasses
import functools
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

from osdp_ray.planning.choices import uniform_sections
from osdp_ray.profiling.trace import Trace, trace
from osdp_ray.records.plan import Choice, Plan, Synchronise
from osdp_ray.records.profile import Precision, Profile, Recompute
from osdp_ray.workload import Workload
from osdp_ray.workloads.gpt import GptWorkload
from tests.models import HF, ZOO
from tests.oracle import UNIFORM_CHOICES, make_plan, random_sections, traced_profile

T = TypeVar("T")

_TEXT = str(Path(__file__).with_name("models.py"))  # any few KiB of text are enough of a corpus
GPT: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: GptWorkload(layers=4, hidden=64, heads=2, sequence=32, data=_TEXT),
    "gpt-tied": lambda: GptWorkload(layers=3, hidden=64, heads=4, sequence=32, tied=True, data=_TEXT),
    "gpt-deep": lambda: GptWorkload(layers=10, hidden=48, heads=3, sequence=24, data=_TEXT),
    "gpt-wide": lambda: GptWorkload(layers=3, hidden=192, heads=4, sequence=64, vocabulary=1500, data=_TEXT),
    "gpt-dropout": lambda: GptWorkload(layers=3, hidden=64, heads=2, sequence=32, dropout=0.1, data=_TEXT),
}
MODELS: dict[str, Callable[[], Workload]] = {**GPT, **ZOO}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# Ranks per node: 2 to 1024 ranks, on one node or on several.
WORLDS: tuple[tuple[int, ...], ...] = (
    (2,),
    (3,),
    (4,),
    (8,),
    (16,),
    (2, 2),
    (2, 2, 2),
    (4, 4),
    (8, 8),
    (8,) * 8,
    (8,) * 32,
    (8,) * 128,
)
HYBRID_CHOICES = {
    "HSDP": Choice(shard_over="node", regather=True),
    "HSDP-2": Choice(shard_over="node", regather=False),
    "ZeRO-3 hpZ": Choice(shard_over="world", regather=True, keep_node_shard=True),
}
_ACCUMULATIONS = (1, 1, 1, 2, 3, 4)
_MAX_MICRO_BATCH = 6
_PREFETCHES = (0, 0, 1, 1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseDraw:
    """What a case is, in words. `choice` is the uniform plan's name and None for a mixed one, whose decisions, its
    recomputation with them, come from `plan_seed`."""

    index: int
    model: str
    precision: Precision
    ranks_per_node: tuple[int, ...]
    micro_batch: int
    accumulation: int
    synchronise: Synchronise
    choice: str | None
    recompute: Recompute | Literal["mixed"]
    plan_seed: int
    prefetch: int

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def is_plain(self) -> bool:
        """fp32 and no accumulation (no case clips): the peak must be right to the byte."""
        return self.precision == "fp32" and self.accumulation == 1

    @property
    def label(self) -> str:
        nodes, per_node = len(self.ranks_per_node), self.ranks_per_node[0]
        return (
            f"case {self.index}: {self.model} {self.precision}, {nodes} x {per_node} ranks, micro-batch "
            f"{self.micro_batch} x {self.accumulation} ({self.synchronise}), {self.choice or 'mixed'}, "
            f"recompute {self.recompute}, prefetch {self.prefetch}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A drawn case with what a prediction and the truth need."""

    draw: CaseDraw
    workload: Workload
    profile: Profile
    plan: Plan


def available_models() -> tuple[str, ...]:
    """The names in MODELS that can be built here: those of Hugging Face need transformers."""
    has_transformers = importlib.util.find_spec("transformers") is not None
    return tuple(name for name in MODELS if has_transformers or name not in HF)


def subjects_of(models: Sequence[str]) -> list[tuple[str, Precision]]:
    """Models with the precisions that they run in; BatchNorm on CPU does not mix bf16 with fp32 buffers."""
    return [(m, p) for m in models for p in PRECISIONS if (m, p) != ("conv-net", "bf16")]


def draw_cases(
    num_cases: int, seed: int, *, models: Sequence[str] = (), worlds: Sequence[tuple[int, ...]] = WORLDS
) -> tuple[CaseDraw, ...]:
    """The first `num_cases` cases of a seed; more of them begin with the same ones.

    `models` are names in MODELS, all that can be built here where none are given.
    """
    rng = random.Random(f"memory cases {seed}")
    subjects = Deck(rng, subjects_of(models or available_models()))
    deck_of_worlds, accumulations = Deck(rng, worlds), Deck(rng, _ACCUMULATIONS)
    shapes, recomputes = Deck(rng, ("uniform", "mixed")), Deck(rng, RECOMPUTES)
    synchronises: Deck[Synchronise] = Deck(rng, ("every", "last"))
    choices = {False: Deck(rng, tuple(UNIFORM_CHOICES)), True: Deck(rng, (*UNIFORM_CHOICES, *HYBRID_CHOICES))}
    prefetches = Deck(random.Random(f"prefetches {seed}"), _PREFETCHES)  # the other fields stay those of a seed
    draws = []
    for index in range(num_cases):
        (model, precision), ranks_per_node = subjects.deal(), deck_of_worlds.deal()
        accumulation, is_uniform = accumulations.deal(), shapes.deal() == "uniform"
        draws.append(
            CaseDraw(
                index=index,
                model=model,
                precision=precision,
                ranks_per_node=ranks_per_node,
                micro_batch=rng.randint(1, _MAX_MICRO_BATCH),
                accumulation=accumulation,
                synchronise=synchronises.deal() if accumulation > 1 else "every",
                choice=choices[len(ranks_per_node) > 1].deal() if is_uniform else None,
                recompute=recomputes.deal() if is_uniform else "mixed",
                plan_seed=rng.randrange(1 << 30),
                prefetch=prefetches.deal(),
            )
        )
    return tuple(draws)


def build_case(draw: CaseDraw) -> MemoryCase:
    """Traces the model, once per model and precision in a process, and makes the plan. Raises TraceError."""
    workload, traced = workload_and_trace(draw.model, draw.precision)
    profile = traced_profile(workload, traced, ranks_per_node=draw.ranks_per_node)
    if draw.choice is None or draw.recompute == "mixed":
        sections = random_sections(profile, random.Random(draw.plan_seed))
    else:
        sections = uniform_sections(profile, {**UNIFORM_CHOICES, **HYBRID_CHOICES}[draw.choice], draw.recompute)
    plan = make_plan(
        profile,
        sections,
        micro_batch=draw.micro_batch,
        accumulation=draw.accumulation,
        synchronise=draw.synchronise,
        prefetch=draw.prefetch,
    )
    return MemoryCase(draw=draw, workload=workload, profile=profile, plan=plan)


def memory_cases(num_cases: int, seed: int, *, models: Sequence[str] = ()) -> Iterator[MemoryCase]:
    """`draw_cases`, built one by one as they are asked for."""
    return map(build_case, draw_cases(num_cases, seed, models=models))


@functools.cache
def workload_and_trace(model: str, precision: Precision) -> tuple[Workload, Trace]:
    """A model's workload and its trace. Raises TraceError."""
    workload = MODELS[model]()
    workload.precision = precision
    return workload, trace(workload)


class Deck(Generic[T]):
    """Deals values in random order, each once before the deck is shuffled anew."""

    def __init__(self, rng: random.Random, values: Sequence[T]) -> None:
        self._rng, self._values = rng, tuple(values)
        self._left: list[T] = []

    def deal(self) -> T:
        if not self._left:
            self._left = self._rng.sample(self._values, len(self._values))
        return self._left.pop()
