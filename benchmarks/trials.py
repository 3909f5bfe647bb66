"""Training steps of many plans, one after the other, on the same measuring actors: a model is built under a plan,
trains for some steps by the executor's own loop, and is dropped. Only starting processes is left out.
"""

import argparse
import contextlib
import dataclasses
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster import missing_requirement
from harness import flag_parser

from osdp_ray.costs import predict_sections, table_of
from osdp_ray.discovery import connect, discover
from osdp_ray.execution.options import TrainOptions
from osdp_ray.execution.worker import TrainLoop
from osdp_ray.modeling.recompute import recompute_block
from osdp_ray.modeling.structure import find_blocks
from osdp_ray.planning.choices import group_units, large_operators, uniform_sections, with_slices
from osdp_ray.profiling import links
from osdp_ray.profiling import profile as make_profile
from osdp_ray.profiling.actors import MeasuringGroup
from osdp_ray.records.cluster import Cluster
from osdp_ray.records.plan import Choice, Plan, SectionPlan, SolverReport, parse_slice, slice_name
from osdp_ray.records.profile import Profile, Recompute
from osdp_ray.records.telemetry import Sample
from osdp_ray.schema import read_json, write_json
from osdp_ray.workload import Workload

WARM_UP_STEPS = 2  # the first makes the optimizer's state and opens connections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What the steps of a plan took, each step by its slowest rank."""

    step_s: tuple[float, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def try_plan(group: MeasuringGroup, workload: Workload, plan: Plan, *, num_steps: int, limit_s: float = 120.0) -> Trial:
    """Trains `num_steps` measured steps under a plan on a group, after two that warm up."""
    per_rank = group.run(train_steps, workload, plan.to_json(), num_steps + WARM_UP_STEPS, timeout_s=limit_s)
    counted = [samples[WARM_UP_STEPS:] for samples in per_rank]

    def median(name: str) -> float:
        return statistics.median(max(getattr(s, name) for s in step) for step in zip(*counted, strict=True))

    return Trial(
        step_s=tuple(max(sample.step_s for sample in step) for step in zip(*counted, strict=True)),
        forward_s=median("forward_s"),
        backward_s=median("backward_s"),
        optimizer_s=median("optimizer_s"),
    )


def train_steps(workload: Workload, plan: dict[str, Any], num_steps: int) -> list[Sample]:
    """Runs on every rank: the samples of `num_steps` steps."""
    observer = _Recorder()
    loop = _Loop(
        workload=workload,
        plan=Plan.from_json(plan),
        options=TrainOptions(num_steps=num_steps),
        run_dir="",
        plan_index=0,
        device=torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"),
        observer=observer,
    )
    loop.run(None)
    del loop
    gc.collect()
    return observer.samples


class _Loop(TrainLoop):
    """The executor's loop, which writes nothing."""

    def _save(self) -> None:
        pass

    def _evaluate(self) -> None:
        return None


@dataclasses.dataclass
class _Memory:
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    num_retries: int = 0


class _Recorder:
    """Keeps samples where training pushes them to a hub."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    @contextlib.contextmanager
    def measure(self, step: int, live_bytes: Any) -> Iterator[_Memory]:
        yield _Memory()

    def record(self, sample: Sample) -> None:
        self.samples.append(sample)

    def is_sampled(self, step: int) -> bool:
        return False

    def attend(self) -> str:
        return ""

    def command(self) -> str:
        return ""

    def persistent_bytes(self, *_: Any) -> int:
        return 0

    def resident_bytes(self) -> int:
        return 0


def plan_of(
    profile: Profile,
    sections: tuple[SectionPlan, ...],
    *,
    micro_batch: int,
    accumulation: int = 1,
    budget_bytes: int = 1 << 40,
) -> Plan:
    """A plan of these decisions with its prediction; nothing is searched."""
    return Plan(
        workload=profile.workload,
        workload_hash=profile.workload_hash,
        ranks_per_node=profile.ranks_per_node,
        precision=profile.precision,
        budget_bytes=budget_bytes,
        global_batch=micro_batch * accumulation * profile.num_ranks,
        micro_batch=micro_batch,
        accumulation=accumulation,
        synchronise="every",
        sections=sections,
        prediction=predict_sections(profile, sections, micro_batch=micro_batch, accumulation=accumulation),
        alternatives=(),
        solver=SolverReport(solver="none", status="feasible", gap_fraction=0.0, num_solves=0, num_cuts=0),
        prefetch=profile.default_prefetch,
    )


def uniform(profile: Profile, choice: Choice, recompute: Recompute = "none") -> tuple[SectionPlan, ...]:
    return uniform_sections(profile, choice, recompute)


def blocks_in_turn(
    profile: Profile, choices: Sequence[Choice], recomputes: Sequence[Recompute] = ("none",)
) -> tuple[SectionPlan, ...]:
    """Sections that take the choices in turn, each as a whole."""
    sections = []
    for index, section in enumerate(profile.sections):
        chosen = uniform_sections(profile, choices[index % len(choices)], recomputes[index % len(recomputes)])
        sections.append(dataclasses.replace(chosen[index], name=section.name))
    return tuple(sections)


def operators_in_turn(profile: Profile, choices: Sequence[Choice]) -> tuple[SectionPlan, ...]:
    """Sections whose operators take the choices in turn, so that a block has a unit for each."""
    sections = []
    for index, section in enumerate(profile.sections):
        section_class = profile.classes[section.class_index]
        chosen = {operator.name: choices[i % len(choices)] for i, operator in enumerate(section_class.operators)}
        whole = uniform_sections(profile, choices[0], "none")[index]
        sections.append(dataclasses.replace(whole, units=group_units(section_class, chosen)))
    return tuple(sections)


def in_slices(profile: Profile, choices: tuple[Choice, ...], num_slices: int) -> tuple[SectionPlan, ...]:
    """Sections whose large operators run as so many slices, the first half of them with the last choice."""
    sections = []
    for section, whole in zip(profile.sections, uniform_sections(profile, choices[0], "none"), strict=True):
        section_class = profile.classes[section.class_index]
        large = [section_class.operators[i].name for i in large_operators(profile, section.class_index)]
        names = [slice_name(name, j, num_slices) for name in large for j in range(num_slices)]
        cut = with_slices(section_class, names)
        early = {name for name in names if 2 * parse_slice(name)[1] < num_slices}
        chosen = {operator.name: choices[-1 if operator.name in early else 0] for operator in cut.operators}
        sections.append(dataclasses.replace(whole, units=group_units(cut, chosen)))
    return tuple(sections)


# -- the parts of a step on their own


def collectives_of(profile: Profile, plan: Plan) -> list[tuple[str, str, int]]:
    """What a plan's step says over the links, in order: (kind of group, collective, bytes of the whole tensor)."""
    calls: list[tuple[str, str, int]] = []
    placed = list(zip(plan.sections, profile.sections, strict=True))

    def add(kind: str, name: str, num_bytes: int) -> None:
        if num_bytes:
            calls.append((kind, name, num_bytes))

    for number in range(1, plan.accumulation + 1):
        for is_backward in (False, True):
            for section, described in reversed(placed) if is_backward else placed:
                for unit in section.units:
                    sizes = table_of(profile).unit_bytes(described.class_index, unit)
                    kind = "node" if unit.choice.shard_over == "node" else "world"
                    if sizes.group_size > 1 and (not is_backward or unit.choice.regather):
                        add(kind, "all_gather", sizes.flat_bytes)
                    if not is_backward or (plan.synchronise == "last" and number < plan.accumulation):
                        continue
                    if sizes.group_size == 1:
                        for num_bytes in sizes.replica_bytes:
                            add("world", "all_reduce", num_bytes)
                        continue
                    add(kind, "reduce_scatter", sizes.reduce_bytes)
                    if kind == "node":
                        add("across", "all_reduce", sizes.gradient_bytes)
    return calls


def predicted_link_s(profile: Profile, calls: Sequence[tuple[str, str, int]]) -> float:
    return sum(profile.link(kind, name).seconds(num_bytes) for kind, name, num_bytes in calls)  # type: ignore[arg-type]


def time_collectives_of(
    members: dict[Any, tuple[tuple[int, ...], ...]], calls: Sequence[tuple[str, str, int]], repeats: int
) -> float:
    """Runs on every rank: median seconds of these collectives one after the other, without computing.

    Over gloo reductions over the world run on while others begin, as those of replicated units do.
    """
    groups = {
        kind: dist.group.WORLD if kind == "world" else dist.new_subgroups_by_enumeration([list(m) for m in ranks])[0]
        for kind, ranks in members.items()
    }
    prepared = [_prepared(kind, name, groups[kind], num_bytes) for kind, name, num_bytes in calls]
    rows = []
    for _ in range(repeats + 1):
        dist.barrier()
        began_s = time.perf_counter()
        for work in [work for call in prepared if isinstance(work := call(), dist.Work)]:
            work.wait()
        rows.append(time.perf_counter() - began_s)
    return statistics.median(rows[1:])


def _prepared(kind: str, name: Any, group: dist.ProcessGroup, num_bytes: int) -> Callable[[], object]:
    if (kind, name) == ("world", "all_reduce") and dist.get_backend() == "gloo":
        whole = torch.ones(-(-num_bytes // 4))
        return lambda: dist.all_reduce(whole, group=group, async_op=True)
    return links.prepared_collective(name, group, num_bytes)[1]


def time_computing(workload: Workload, recompute: Recompute, micro_batch: int, repeats: int) -> float:
    """Runs on every rank: median seconds of forward and backward of the whole model, which no rank shares."""
    model = workload.build_model()
    if recompute != "none":
        for name in find_blocks(model, workload.blocks):
            recompute_block(model.get_submodule(name), recompute)
    batches = workload.build_batches(dist.get_rank(), dist.get_world_size(), micro_batch, 0, 0)
    rows = []
    for _ in range(repeats + 1):
        batch = next(batches)
        dist.barrier()
        began_s = time.perf_counter()
        workload.loss(model, batch).backward()
        rows.append(time.perf_counter() - began_s)
        model.zero_grad(set_to_none=True)
    return statistics.median(rows[1:])


# -- results that stay, so that a benchmark that was cut short goes on where it was


class Kept:
    """Measurements by their name, in a JSON file that is written after each one."""

    def __init__(self, path: Path, *, is_fresh: bool) -> None:
        self._path = path
        self._values: dict[str, Any] = {} if is_fresh or not path.exists() else read_json(path)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was measured before under this name, else what `measure` gives now: plain JSON values."""
        if name not in self._values:
            self._values[name] = measure()
            write_json(self._path, self._values)
        return self._values[name]

    def replace(self, name: str, value: Any) -> None:
        """Keeps a value that is worked out anew each time."""
        self._values[name] = value
        write_json(self._path, self._values)


def kept_profile(kept: Kept, name: str, workload: Workload, cluster: Cluster) -> tuple[Profile, float]:
    """The profile of this name and the seconds that it took, measured now where it is not kept."""

    def measure() -> list[Any]:
        began_s = time.monotonic()
        made = make_profile(workload, cluster)
        return [made.to_json(), time.monotonic() - began_s]

    raw, taken_s = kept.get(name, measure)
    return Profile.from_json(raw), taken_s


def bed_flags(description: str, *, extra: dict[str, str] | None = None) -> argparse.Namespace:
    """The flags of a benchmark that runs inside a test bed and can be cut short; `extra` are switches, explained."""
    parser = flag_parser(description)
    for name, told in (extra or {}).items():
        parser.add_argument(name, action="store_true", help=told)
    parser.add_argument("--kept", type=Path, metavar="FILE", help="go on with what this file holds, and keep it there")
    parser.add_argument("--mbit", type=float, nargs="*", help="speeds of the cables, each in turn")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # what the script is to do inside the bed
    return parser.parse_args()


def inside_bed(script: str, task: str, bed: Any, kept: Path, *, is_quick: bool, timeout_s: float) -> None:
    """Runs the script again inside the first node of a bed, for one task; its output comes through as it is."""
    words = [sys.executable, script, "--inside", task, "--kept", str(kept), *(["--quick"] if is_quick else [])]
    process = bed.node(0).popen(words, stdin=subprocess.DEVNULL)
    try:
        if process.wait(timeout_s) != 0:
            raise SystemExit(f"{Path(script).name} failed inside the test bed, in {task}")
    except BaseException:
        process.kill()
        raise


def attach() -> Cluster:
    """The cluster of the bed that this process runs in."""
    connect(None, num_workers=None)
    return discover()


def skip_without_bed() -> None:
    """Ends the script in good order where no test bed can be made."""
    if (reason := missing_requirement()) is not None:
        print(f"skipped: {reason}")
        raise SystemExit(0)
