"""What the command line says of files and words that do not fit; every one is a line and exit code 2."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from osdp_ray.cli import guarded, main
from osdp_ray.execution.saves import Save, save
from osdp_ray.records.profile import Profile
from osdp_ray.signals import StopSignals

GOLDEN = Path(__file__).parent.parent / "golden"
PROFILE = str(GOLDEN / "profile-gpt-4x128.json")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("plan") / "plan.json")
    assert main(["plan", PROFILE, "--memory-budget", "1GiB", "--out", path]) == 0
    return path


@pytest.fixture
def error(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command line adds the folder that it runs in

    def of(*arguments):
        assert main(arguments) == 2
        return capsys.readouterr().err

    return of


def test_a_missing_file_is_answered_with_the_command_that_makes_it(error, plan):
    made_by = "make it by 'osdp profile WORKLOAD --out a.json'"
    assert f"there is no profile 'a.json'. Name a workload and give --cluster, or {made_by}" in error("plan", "a.json")
    assert "'osdp profile WORKLOAD --out profile.json'" in error("plan", "gpt")
    assert f"there is no profile 'a.json'. M{made_by[1:]}" in error("explain", plan, "--profile", "a.json")
    assert "Make it by 'osdp plan profile.json --out b.json'" in error("explain", "b.json", "--profile", PROFILE)


def test_a_profile_is_no_workload(error):
    assert "profile-gpt-4x128.json is a file, and a workload is needed" in error(
        "plan", PROFILE, "--cluster", "8x-a100-nvlink"
    )


def test_a_word_that_does_not_convert_is_named_with_its_key(error):
    assert "layers=two of workload 'gpt' is no int" in error("plan", "gpt", "layers=two", "--cluster", "8x-a100-nvlink")


def test_explain_takes_the_plans_own_profile_alone(error, plan, tmp_path):
    assert main(["explain", plan, "--profile", PROFILE]) == 0
    profile, other = Profile.load(PROFILE), str(tmp_path / "other.json")
    for change, message in (
        ({"workload_hash": "0"}, "the plan was made for workload"),
        ({"ranks_per_node": (1,)}, f"for ranks per node {profile.num_ranks}, and here it is 1. Plan again"),
        ({"precision": "bf16"}, "for precision fp32, and here it is bf16"),
        ({"sections": profile.sections[1:]}, "for sections 6 in number, and here it is 5 in number"),
    ):
        dataclasses.replace(profile, **change).save(other)
        assert message in error("explain", plan, "--profile", other)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_at_any_moment_is_told_and_gives_its_exit_code(capsys, number, code):
    before = signal.getsignal(number)
    assert guarded(lambda: os.kill(os.getpid(), number) or time.sleep(9)) == code
    assert capsys.readouterr().err.startswith(f"stopped by signal {int(number)} before anything was saved")
    assert signal.getsignal(number) is before


def test_a_signal_during_an_import_waits_for_its_end(capsys, tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(0.1)\n"
        "except BaseException:\n    pass\n"  # as modules written in C do
        "is_whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def work():
        import slow_module

        seen.append(slow_module.is_whole)
        time.sleep(9)
        return 0

    seen = []
    assert guarded(work) == 143
    assert seen == [True]


def test_a_signal_whose_exception_was_dropped_is_found_by_the_next_who_listens():
    def work():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(9)
        with StopSignals():
            return 0

    assert guarded(work) == 143


def test_a_save_is_exported_from_the_command_line(tmp_path, capsys, error):
    model = torch.nn.Linear(3, 2)
    save(tmp_path / "run", Save(step=1, config={"model_type": "none"}), model, torch.optim.SGD(model.parameters()))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "out" / name) for name in ("model.safetensors", "config.json")
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "none"}
    assert "there is no save in it. Give a run" in error("export", str(tmp_path), "--out", str(tmp_path / "b"))
    arguments = ["train", "gpt", "--out", str(tmp_path / "b"), "--init-from", str(tmp_path / "nowhere")]
    assert "there is no such file or folder. Give a folder or file of safetensors" in error(*arguments)
