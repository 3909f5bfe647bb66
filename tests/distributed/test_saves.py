"""Saves are exact, know no plan and no world size, are whole or absent, and refuse what is damaged or foreign.

Two gloo ranks run the training loop of the workers once; the single-process cases then read what they saved.
"""

import contextlib
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist

from osdp_ray.errors import SaveError
from osdp_ray.execution.options import TrainOptions
from osdp_ray.execution.saves import latest_save, list_saves, load, read_save
from osdp_ray.execution.worker import TrainLoop
from osdp_ray.modeling.structure import build_structure
from osdp_ray.observation import AllocatorPeak, persistent_bytes, resident_bytes
from osdp_ray.records.plan import Choice, Plan, Prediction, SectionPlan, SolverReport, Unit
from osdp_ray.workloads.gpt import GptWorkload
from tests.ranks import start_ranks

NUM_STEPS, SAVE_AT, GLOBAL_BATCH = 6, 3, 4
CHOICES = {
    "DP": Choice(shard_over="none", regather=False),
    "ZeRO-2": Choice(shard_over="world", regather=False),
    "ZeRO-3": Choice(shard_over="world", regather=True),
}
MIXED = ("ZeRO-3", "DP", "ZeRO-3", "ZeRO-2")  # stem, two blocks, head


class LocalObserver:
    """What TrainLoop needs of an observer, without a hub."""

    persistent_bytes, resident_bytes = staticmethod(persistent_bytes), staticmethod(resident_bytes)

    def __init__(self, command="", command_at=0):
        self.samples, self.notes, self._peak = [], [], AllocatorPeak("cpu")
        self._command, self._command_at = command, command_at

    def is_sampled(self, step):
        return self._peak.is_sampled(step)

    def measure(self, step, live_bytes):
        return self._peak.measure(step, live_bytes)

    def attend(self):
        return self._command if self._command_at == 0 else ""

    def command(self):
        return self._command if len(self.samples) + 1 >= self._command_at else ""

    def record(self, sample):
        self.samples.append(sample)

    def flush(self):
        pass

    def undrained(self):
        return tuple(self.samples[-1:])

    def note(self, kind, **facts):
        self.notes.append((kind, facts))


def workload(data, *, dropout=0.0, layers=2):
    return GptWorkload(layers=layers, hidden=32, heads=2, sequence=16, data=data, dropout=dropout, held_out_windows=4)


def make_plan(work, labels, *, num_ranks, micro_batch):
    with torch.device("meta"):
        model = work.build_model()
    order = [name for name, _ in model.named_modules()]
    structure = build_structure(model, tuple(f"blocks.{i}" for i in range(work.layers)), order)
    sections = []
    for section, label in zip(structure.sections, labels, strict=True):
        section_class = structure.classes[section.class_index]
        units = tuple(
            Unit(operators=(operator.name,), modules=operator.modules, choice=CHOICES[label])
            for operator in section_class.operators
        )
        if section_class.is_block:  # its first half at the block's door, the others at their operators
            door = units[: len(units) // 2]
            first = Unit(
                operators=tuple(unit.operators[0] for unit in door),
                modules=tuple(name for unit in door for name in unit.modules),
                choice=CHOICES[label],
            )
            units = (first, *units[len(door) :])
        sections.append(SectionPlan(name=section.name, is_block=section_class.is_block, recompute="none", units=units))
    prediction = Prediction(
        peak_bytes=0, persistent_bytes=0, peak_by_phase={}, step_s=1.0, step_s_by_phase={}, samples_per_s=1.0
    )
    solver = SolverReport(solver="hand", status="feasible", gap_fraction=0.0, num_solves=0, num_cuts=0)
    return Plan(
        workload=work.name,
        workload_hash=work.hash(),
        ranks_per_node=(num_ranks,),
        precision="fp32",
        synchronise="every",
        budget_bytes=1,
        global_batch=GLOBAL_BATCH,
        micro_batch=micro_batch,
        accumulation=GLOBAL_BATCH // num_ranks // micro_batch,
        sections=tuple(sections),
        prediction=prediction,
        alternatives=(),
        solver=solver,
    )


@contextlib.contextmanager
def process_group(rank, num_ranks, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(work, labels, run_dir, *, resume_from=None, micro_batch=1, save_every=0, observer=None, num_steps=NUM_STEPS):
    observer = observer or LocalObserver()
    plan = make_plan(work, labels, num_ranks=dist.get_world_size(), micro_batch=micro_batch)
    loop = TrainLoop(
        workload=work,
        plan=plan,
        options=TrainOptions(num_steps=num_steps, seed=7, save_every=save_every, max_norm=0.5),
        run_dir=str(run_dir),
        plan_index=0,
        device=torch.device("cpu"),
        observer=observer,
    )
    verdict = loop.run(resume_from)
    return {"verdict": verdict, "losses": [sample.loss for sample in observer.samples], "samples": observer.samples}


def two_ranks(rank, folder, data):
    torch.set_num_threads(1)
    out = {}
    with process_group(rank, 2, f"{folder}/store"):
        plain, noisy = workload(data), workload(data, dropout=0.2)
        out["plain"] = train(plain, MIXED, f"{folder}/plain", save_every=SAVE_AT)
        out["noisy"] = train(noisy, MIXED, f"{folder}/noisy", save_every=SAVE_AT)
        at = f"saves/step-{SAVE_AT:08d}"
        out["noisy resumed"] = train(noisy, MIXED, f"{folder}/again", resume_from=f"{folder}/noisy/{at}")
        for name, labels, micro_batch in (("DP", ("DP",) * 4, 2), ("ZeRO-3", ("ZeRO-3",) * 4, 1)):
            resumed = f"{folder}/plain/{at}"
            out[name] = train(plain, labels, f"{folder}/{name}", resume_from=resumed, micro_batch=micro_batch)
        stop = LocalObserver("stop" if rank == 0 else "", command_at=4)
        out["stopped"] = train(plain, MIXED, f"{folder}/stopped", observer=stop)
        out["stopped at once"] = train(plain, MIXED, f"{folder}/never", observer=LocalObserver("stop"))
        os.makedirs(f"{folder}/many/saves/.unfinished-step-00000001", exist_ok=True)
        out["many"] = train(plain, ("ZeRO-3",) * 4, f"{folder}/many", save_every=1)
    torch.save({name: {**value, "samples": None} for name, value in out.items()}, f"{folder}/rank-{rank}.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    data = folder / "text"
    data.write_text("".join(f"line {number} of some text to learn, and {number**2} more\n" for number in range(300)))
    start_ranks(two_ranks, (str(folder), str(data)), 2)
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]
    return folder, str(data), results


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit_dropout_included(runs):
    _, _, (first, second) = runs
    assert first["noisy resumed"]["losses"] == first["noisy"]["losses"][SAVE_AT:]
    assert first["noisy resumed"]["losses"] == second["noisy resumed"]["losses"]
    assert first["noisy resumed"]["verdict"]["eval_loss"] == first["noisy"]["verdict"]["eval_loss"]
    assert first["noisy resumed"]["verdict"]["first_loss"] == first["noisy"]["losses"][0]


@pytest.mark.parametrize("other", ["DP", "ZeRO-3"])
def test_any_plan_and_micro_batch_continues_from_the_save_of_another_plan(runs, other):
    _, _, (first, _) = runs
    assert first[other]["losses"] == pytest.approx(first["plain"]["losses"][SAVE_AT:], rel=1e-5)
    assert first[other]["losses"][-1] < first["plain"]["losses"][0]


def test_one_process_continues_from_the_save_of_two(runs, tmp_path):
    folder, data, (first, _) = runs
    save = folder / "plain" / "saves" / f"step-{SAVE_AT:08d}"
    with process_group(0, 1, tmp_path / "store"):
        alone = train(workload(data), ("ZeRO-3",) * 4, tmp_path / "alone", resume_from=str(save), micro_batch=2)
    assert alone["losses"] == pytest.approx(first["plain"]["losses"][SAVE_AT:], rel=1e-5)


def test_a_stop_saves_at_the_same_step_on_every_rank(runs):
    folder, _, (first, second) = runs
    assert first["stopped"]["verdict"]["status"] == second["stopped"]["verdict"]["status"] == "stopped"
    assert first["stopped"]["verdict"]["step"] == second["stopped"]["verdict"]["step"] == 4
    assert read_save(latest_save(folder / "stopped")).num_samples == 4 * GLOBAL_BATCH
    assert first["stopped"]["losses"] == first["plain"]["losses"][:4]


def test_a_stop_before_the_first_step_ends_cleanly_without_a_save(runs):
    folder, _, (first, _) = runs
    assert first["stopped at once"]["verdict"] | {"eval_loss": None} == {
        "status": "stopped",
        "step": 0,
        "save": None,
        "first_loss": None,
        "final_loss": None,
        "eval_loss": None,
    }
    assert latest_save(folder / "never") is None


def test_the_newest_two_saves_are_kept_and_unfinished_ones_are_cleared_away(runs):
    folder, _, _ = runs
    assert sorted(os.listdir(folder / "many" / "saves")) == ["step-00000005", "step-00000006"]
    assert [path.name for path in list_saves(folder / "many")] == ["step-00000005", "step-00000006"]


def test_an_unfinished_save_is_never_the_latest(runs, tmp_path):
    folder, _, _ = runs
    shutil.copytree(folder / "many" / "saves", tmp_path / "saves")
    os.rename(tmp_path / "saves" / "step-00000006", tmp_path / "saves" / ".unfinished-step-00000006")
    assert latest_save(tmp_path).name == "step-00000005"


def resume_alone(work, path, optimizer=None):
    model = work.build_model()
    optimizer = (optimizer or work.build_optimizer)(model.parameters())
    return load(path, model, optimizer, None, workload_hash=work.hash())


@pytest.fixture
def damaged(runs, tmp_path):
    folder, data, _ = runs
    path = tmp_path / "step-00000003"
    shutil.copytree(folder / "plain" / "saves" / "step-00000003", path)
    return path, workload(data)


def test_a_save_loads_without_a_process_group_into_a_plain_model(damaged):
    path, work = damaged
    assert resume_alone(work, path).step == SAVE_AT


def test_a_truncated_file_is_named_with_both_sizes(damaged):
    path, work = damaged
    data_file = path / "__1_0.distcp"
    size_bytes = data_file.stat().st_size
    os.truncate(data_file, size_bytes // 2)
    with pytest.raises(SaveError, match=rf"__1_0.distcp has {size_bytes // 2} bytes, and \d+ are needed.*Delete"):
        resume_alone(work, path)


def test_damaged_tensor_data_is_refused(damaged):
    path, work = damaged
    data_file = path / "__0_0.distcp"
    data_file.write_bytes(b"\0" * data_file.stat().st_size)
    with pytest.raises(SaveError, match=r"its tensors cannot be read.*Delete this folder"):
        resume_alone(work, path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (".metadata", r"its index .metadata cannot be read.*Delete this folder"),
        ("save.json", r"there is no save.json in it.*Delete this folder"),
        ("__0_0.distcp", r"the file __0_0.distcp of one rank is missing.*All nodes must share the folder"),
    ],
)
def test_a_missing_file_is_named(damaged, name, problem):
    path, work = damaged
    (path / name).unlink()
    with pytest.raises(SaveError, match=problem):
        resume_alone(work, path)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80"], ids=["empty", "junk", "cut"])
def test_a_damaged_index_is_refused(damaged, content):
    path, work = damaged
    (path / ".metadata").write_bytes(content)
    with pytest.raises(SaveError, match="damaged or foreign"):
        resume_alone(work, path)


class Trap:
    def __reduce__(self):
        return os.mkdir, (os.environ["TRAP"],)


def test_an_index_that_would_run_code_is_refused_without_running_it(damaged, monkeypatch):
    path, work = damaged
    monkeypatch.setenv("TRAP", str(path / "sprung"))
    (path / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(SaveError, match=r"damaged or foreign \(it names posix.mkdir"):
        resume_alone(work, path)
    assert not (path / "sprung").exists()


def test_a_damaged_record_is_refused(damaged):
    path, work = damaged
    values = json.loads((path / "save.json").read_text())
    del values["step"]
    (path / "save.json").write_text(json.dumps(values))
    with pytest.raises(SaveError, match="'step' is missing"):
        resume_alone(work, path)


def test_the_save_of_another_workload_is_refused(damaged):
    path, work = damaged
    other = workload(work.data, layers=3)
    with pytest.raises(SaveError, match=f"{work.hash()}, and this one's is {other.hash()}.*another --out"):
        resume_alone(other, path)


def test_missing_and_extra_tensors_are_listed_by_name(damaged):
    path, work = damaged
    other = workload(work.data, layers=3)
    other.hash = work.hash
    with pytest.raises(SaveError, match=r"it lacks model.blocks.2.attention.projection.bias, .* and \d+ more"):
        resume_alone(other, path)
    fewer = workload(work.data, layers=1)
    fewer.hash = work.hash
    with pytest.raises(SaveError, match=r"it has model.blocks.1.* more, which this model or optimizer lacks"):
        resume_alone(fewer, path)
