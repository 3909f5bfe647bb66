"""A save that cannot be written is told on every rank, the one before it stays, and training goes on to the next.

One rank's disk is full: the system refuses its files beyond a size. Or the folder of the saves is lost. Two gloo ranks
run the training loop of the workers once.
"""

import json
import resource
import shutil

import pytest
import torch

from osdp_ray.errors import SaveError
from osdp_ray.execution.options import TrainOptions
from osdp_ray.execution.saves import latest_save, list_saves, read_save
from osdp_ray.execution.worker import TrainLoop
from tests.distributed.test_saves import LocalObserver, make_plan, process_group, workload
from tests.ranks import start_ranks

NUM_STEPS, FULL_BYTES = 5, 4096


class Trouble(LocalObserver):
    """After some steps something happens to the disk; what is saved at each note is kept beside it."""

    def __init__(self, run_dir, happens, command="", command_at=0):
        super().__init__(command, command_at)
        self.run_dir, self.happens = run_dir, happens

    def record(self, sample):
        super().record(sample)
        if sample.step in self.happens:
            self.happens[sample.step](self.run_dir)

    def note(self, kind, **facts):
        if kind in ("saved", "save_failed"):
            there = [path.name for path in list_saves(self.run_dir)]
            self.notes.append((kind, facts["step"], facts.get("problem", ""), there))


def fill_disk(run_dir):
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))


def free_disk(run_dir):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def lose_folder(run_dir):
    shutil.move(f"{run_dir}/saves", f"{run_dir}/lost")
    with open(f"{run_dir}/saves", "w"):
        pass


def train(data, run_dir, *, happens, command="", command_at=0, **options):
    work = workload(data)
    observer = Trouble(run_dir, happens, command, command_at)
    loop = TrainLoop(
        workload=work,
        plan=make_plan(work, ("ZeRO-3", "DP", "ZeRO-3", "ZeRO-2"), num_ranks=2, micro_batch=1),
        options=TrainOptions(num_steps=NUM_STEPS, seed=7, **options),
        run_dir=str(run_dir),
        plan_index=0,
        device=torch.device("cpu"),
        observer=observer,
    )
    error = ""
    try:
        status = loop.run(None)["status"]
    except SaveError as caught:
        status, error = "failed", str(caught)
    free_disk(run_dir)
    return {"status": status, "error": error, "notes": observer.notes, "losses": [s.loss for s in observer.samples]}


def two_ranks(rank, folder, data):
    torch.set_num_threads(1)
    on_rank_1 = {2: fill_disk, 4: free_disk} if rank == 1 else {}
    to_the_end = {2: fill_disk} if rank == 1 else {}
    lost = {2: lose_folder} if rank == 0 else {}
    out = {}
    with process_group(rank, 2, f"{folder}/store"):
        out["plain"] = train(data, f"{folder}/plain", happens={})
        for name, in_background in (("at once", False), ("in the background", True)):
            settings = {"save_every": 1, "async_saves": in_background}
            out[f"full, {name}"] = train(data, f"{folder}/full-{in_background}", happens=on_rank_1, **settings)
            out[f"full to the end, {name}"] = train(
                data, f"{folder}/end-{in_background}", happens=to_the_end, **settings
            )
            out[f"lost, {name}"] = train(data, f"{folder}/lost-{in_background}", happens=lost, **settings)
        told = "replan" if rank == 0 else ""
        out["replan"] = train(data, f"{folder}/replan", happens=on_rank_1, command=told, command_at=3, save_every=1)
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump(out, file)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    data = folder / "text"
    data.write_text("".join(f"line {number} of some text to learn, and {number**2} more\n" for number in range(300)))
    start_ranks(two_ranks, (str(folder), str(data)), 2)
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


HOW = pytest.mark.parametrize("how", ["at once", "in the background"])


@HOW
def test_a_full_disk_of_one_rank_fails_the_save_on_every_rank_and_training_goes_on(runs, how):
    folder, ranks = runs
    for outcome in (rank[f"full, {how}"] for rank in ranks):
        assert outcome["status"] == "done"
        assert outcome["losses"] == ranks[0]["plain"]["losses"]
    notes = ranks[0][f"full, {how}"]["notes"]
    assert {step: kind for kind, step, *_ in notes} == {
        1: "saved", 2: "save_failed", 3: "save_failed", 4: "saved", 5: "saved",
    }  # fmt: skip
    for _, step, problem, there in notes:
        if step in (2, 3):
            assert "it cannot be written (rank 1:" in problem
            assert "Free space there" in problem
            assert there == ["step-00000001"], "the old save is gone"
    run = folder / f"full-{how != 'at once'}"
    assert [path.name for path in list_saves(run)] == ["step-00000004", "step-00000005"]
    assert sorted(path.name for path in (run / "saves").iterdir()) == ["step-00000004", "step-00000005"]


@HOW
def test_a_last_save_that_fails_is_an_error_on_every_rank_and_the_old_one_is_whole(runs, how):
    folder, ranks = runs
    for rank in ranks:
        outcome = rank[f"full to the end, {how}"]
        assert outcome["status"] == "failed"
        assert "step-00000005: it cannot be written (rank 1:" in outcome["error"]
        assert len(outcome["losses"]) == NUM_STEPS
    assert read_save(latest_save(folder / f"end-{how != 'at once'}")).step == 1


@HOW
def test_a_lost_folder_is_told_on_every_rank_without_a_hang(runs, how):
    _, ranks = runs
    for rank in ranks:
        outcome = rank[f"lost, {how}"]
        assert outcome["status"] == "failed"
        assert "it cannot be written (" in outcome["error"]
        assert outcome["losses"] == ranks[0]["plain"]["losses"]


def test_without_a_save_training_goes_on_under_the_running_plan(runs):
    _, ranks = runs
    for rank in ranks:
        assert rank["replan"]["status"] == "done"
        assert rank["replan"]["losses"] == ranks[0]["plain"]["losses"]
    assert [kind for kind, step, *_ in ranks[0]["replan"]["notes"] if step == 3] == ["save_failed", "save_failed"]
