"""What a run refuses before it starts, by the flag that mends it."""

import pytest

from osdp_ray.errors import UsageError
from osdp_ray.settings import check_batches
from tests.fake_run import Tiny, run


def test_a_directory_that_holds_another_run_is_refused(world, tmp_path):
    run(world, tmp_path)
    with pytest.raises(UsageError, match=r"holds another run\. Go on with it by --resume, or give another --out"):
        run(world, tmp_path)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, r"is complete: 6 of 6 steps are done\. Raise --steps"),
        ({"num_steps": 9, "seed": 1}, r"has --seed 0, not 1\. Give --seed 0"),
        ({"num_steps": 9, "global_batch": 8}, r"has --global-batch 4, not 8\. Give --global-batch 4"),
        ({"num_steps": 9, "workload": Tiny(2)}, r"holds a run of workload 'tiny' with hash .*give another --out"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(world, tmp_path, settings, remedy):
    run(world, tmp_path)
    with pytest.raises(UsageError, match=remedy):
        run(world, tmp_path, resume=True, **settings)
    assert len(world.attempts) == 1


def test_there_must_be_a_run_to_resume(world, tmp_path):
    with pytest.raises(UsageError, match=r"holds no run to go on with\. Leave --resume out"):
        run(world, tmp_path, resume=True)


def test_out_must_be_a_folder(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"is a file, and a run needs a folder\. Give another --out"):
        run(world, tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot be made .*Give another --out"):
        run(world, tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"global_batch": 10, "num_workers": 4},
            r"of 10 cannot be divided by 4 workers = 4\. Give --global-batch 8 or 12",
        ),
        (
            {"global_batch": 4, "num_workers": 2, "micro_batch": 3},
            r"2 workers x micro-batch 3 = 6\. Give --global-batch 6,",
        ),
        ({"global_batch": 3}, r"of 3 cannot be divided by 2 workers"),  # known only once the cluster is
        ({"num_steps": 0}, r"--steps is 0, and at least 1 is needed"),
        ({"save_every": -1}, r"--save-every is -1, and at least 0 is needed"),
        ({"max_replans": -1}, r"--max-replans is -1, and at least 0 is needed"),
        ({"num_workers": 0}, r"--num-workers is 0, and at least 1 is needed"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_flag(world, tmp_path, settings, remedy):
    with pytest.raises(UsageError, match=remedy):
        run(world, tmp_path, **settings)
    assert world.attempts == []


def test_batches_that_divide_are_taken():
    check_batches(8, 2, None)
    check_batches(8, 2, 4)
