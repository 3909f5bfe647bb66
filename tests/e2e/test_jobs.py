"""Jobs as users start them: submitted to a running cluster with the Kubernetes manifest's flags, stopped by a signal.

Every process is started with an environment of its own, and the cluster with ports and folders of its own, so that
nothing else on the machine is touched, and what is left running is found.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from osdp_ray.records.plan import Plan
from tests.k8s_schema import entrypoint, one, render

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs" / "train_gpt.py"
BIN = Path(sys.executable).parent
NUM_STEPS = 24
MODEL = {"--layers": "2", "--hidden": "32", "--heads": "2", "--seq": "32"}
# The flags that the Kubernetes manifest gives, made small.
SMALL = MODEL | {
    "--num-workers": "2",
    "--memory-budget": "8MiB",
    "--global-batch": "32",
    "--steps": str(NUM_STEPS),
    "--save-every": str(NUM_STEPS // 2),
}
# 16 passes a step make steps long enough for a signal to arrive between two of them.
MORE = ["--micro-batch", "1", "--max-replans", "0"]
RUN_FILES = {
    "cluster.json",
    "profile.json",
    "plan-0.json",
    "telemetry.parquet",
    "metrics.jsonl",
    "saves",
    "summary.json",
}
HEAD_START_S = 120.0
LEFT_RUNNING_S = 15.0
NO_ANSWER_S = 45.0  # a promise to the user: an address without an answer is an error by then


class Head(NamedTuple):
    """A cluster of one node: its dashboard, the environment that its users need, and its temporary folder."""

    dashboard: str
    env: dict[str, str]
    folder: Path


def environment(**settings: str) -> dict[str, str]:
    """This process's own, with the tests' `python` first and nothing of another Ray."""
    kept = ("RAY_worker_niceness",)
    env = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("RAY_")}
    return env | {"PATH": f"{BIN}{os.pathsep}{env.get('PATH', '')}", "RAY_USAGE_STATS_ENABLED": "0"} | settings


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one_socket in opened:
            one_socket.bind(("127.0.0.1", 0))
        return [one_socket.getsockname()[1] for one_socket in opened]


def processes() -> dict[int, tuple[int, str]]:
    """{pid: (parent's pid, command)} of all processes; one that has ended and is not reaped has another command."""
    lines = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    table = (line.split(maxsplit=2) for line in lines.splitlines())
    return {int(words[0]): (int(words[1]), words[2] if len(words) > 2 else "") for words in table}


def descendants(pid: int) -> dict[int, str]:
    """{pid: command} of the children of a process, their children, and so on."""
    table, found = processes(), {}
    parents = {pid}
    while parents:
        parents = {child for child, (parent, _) in table.items() if parent in parents and child not in found}
        found |= {child: table[child][1] for child in parents}
    return found


def still_running(started: dict[int, str]) -> dict[int, str]:
    """Those of `started` that go on running although they had time to end."""
    deadline_s = time.monotonic() + LEFT_RUNNING_S
    while True:
        table = processes()
        left = {pid: command for pid, command in started.items() if table.get(pid, (0, ""))[1] == command}
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.3)


def end(process: subprocess.Popen) -> None:
    """Ends a process that the test has started in a session of its own, and everything below it."""
    below = descendants(process.pid)
    process.send_signal(signal.SIGINT)  # at a SIGTERM, `ray start` waits half a minute for its node to drain
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for pid in [process.pid, *still_running(below)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def run_job(*words: str, timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
    """`python jobs/train_gpt.py ...` on a Ray of its own, to its end."""
    command = [sys.executable, str(JOB), *words]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def read_summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_text("".join(f"{number} squared is {number**2}, and halved {number / 2}\n" for number in range(300)))
    return path


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """`ray start --head` with token authentication."""
    folder = Path(tempfile.mkdtemp(prefix="osdp-", dir="/tmp"))  # short: sockets lie in it, and their paths are limited
    gcs, dashboard, client, agent = free_ports(4)
    env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    words = ["start", "--head", "--block", "--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats"]
    words += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    words += [f"--port={gcs}", f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
    log = tmp_path_factory.mktemp("head") / "log"
    with open(log, "w") as stream:
        process = subprocess.Popen(
            [str(BIN / "ray"), *words, f"--temp-dir={folder}"],
            env=env,
            cwd=folder,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{dashboard}"
        await_dashboard(url, env["RAY_AUTH_TOKEN"], process, log)
        yield Head(url, env, folder)
    finally:
        end(process)
        shutil.rmtree(folder, ignore_errors=True)


def await_dashboard(url: str, token: str, process: subprocess.Popen, log: Path) -> None:
    request = urllib.request.Request(f"{url}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    deadline_s = time.monotonic() + HEAD_START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            return
        time.sleep(0.5)
    pytest.fail(f"the cluster did not start:\n{log.read_text()}")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory to submit: this one's code, and a run's folder, which .gitignore names."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("osdp_ray", "jobs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "runs").mkdir()
    (folder / "runs" / "large").write_bytes(b"0" * 1000)
    return folder


def submit(head: Head, checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`ray job submit --working-dir . -- python jobs/train_gpt.py ...`, to its end; stdout is the job's log."""
    command = [str(BIN / "ray"), "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--"]
    return subprocess.run(
        [*command, "python", "jobs/train_gpt.py", *words],
        env=head.env,
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def submitted(
    head: Head, checkout: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The run of a submitted job, which the interrupted one is compared with."""
    out = tmp_path_factory.mktemp("submitted") / "run"
    return out, submit(head, checkout, *words_of_manifest(data, out))


def words_of_manifest(data: Path, out: Path) -> list[str]:
    """The flags of the Kubernetes manifest's entry point with small values, and those that the tests need beside."""
    python, job, *words = entrypoint(one(render(ROOT / "k8s" / "overlays" / "cpu"), "RayJob"))
    assert (python, job) == ("python", "jobs/train_gpt.py")
    small = SMALL | {"--out": str(out)}
    assert set(words[::2]) == set(small), "the manifest gives other flags than these tests make small"
    return [*(word for flag in words[::2] for word in (flag, small[flag])), *MORE, "--data", str(data)]


def test_a_submitted_job_shows_its_plan_and_progress_and_leaves_a_whole_run(
    submitted: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = submitted
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert re.search(r"^plan 0$", log, re.MULTILINE), log
    assert Plan.load(out / "plan-0.json").table() in log
    assert re.search(rf"^step {NUM_STEPS}/{NUM_STEPS}  loss \d+\.\d{{4}}  ", log, re.MULTILINE), log
    assert "unigram entropy of the held-out text" in log
    assert {path.name for path in out.iterdir()} == RUN_FILES
    assert len(losses(out)) == read_summary(out)["num_steps"] == NUM_STEPS
    saves = sorted(path.name for path in (out / "saves").iterdir())
    assert saves == [f"step-{step:08d}" for step in (NUM_STEPS // 2, NUM_STEPS)]


def test_a_job_gets_the_code_and_not_what_git_ignores(
    head: Head, submitted: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    packages = [path.parent.parent for path in head.folder.glob("session_2*/runtime_resources/*/*/jobs/train_gpt.py")]
    assert len(packages) == 1
    assert (packages[0] / "osdp_ray" / "cli.py").exists()
    assert not (packages[0] / "runs").exists()


def test_a_job_that_cannot_work_fails_with_one_line(head: Head, checkout: Path, data: Path, tmp_path: Path) -> None:
    words = [word for flag, value in MODEL.items() for word in (flag, value)]
    words += ["--num-workers", "40", "--global-batch", "40", "--micro-batch", "1"]
    done = submit(head, checkout, *words, "--data", str(data), "--out", str(tmp_path / "run"))
    log = done.stdout + done.stderr
    assert done.returncode != 0
    errors = set(re.findall(r"^error: .*$", log, re.MULTILINE))  # a set: Ray repeats the end of a failed job's log
    assert len(errors) == 1, log
    assert re.search(r"40 workers were asked for and the cluster has 4 .* Give --num-workers 4 or fewer", errors.pop())
    assert "exit code 2" in log
    assert "Traceback" not in log
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_cluster_with_a_token_lets_nobody_else_submit(head: Head, checkout: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{head.dashboard}/api/jobs/", timeout=30)


def test_a_terminated_run_saves_leaves_nothing_running_and_resumes_to_the_same_loss(
    submitted: tuple[Path, subprocess.CompletedProcess[str]], data: Path, tmp_path: Path
) -> None:
    for name in ("cluster.json", "profile.json", "plan-0.json"):  # the same plan, without profiling again
        shutil.copy(submitted[0] / name, tmp_path / name)
    words = [*words_of_manifest(data, tmp_path), "--resume"]
    process = subprocess.Popen(
        [sys.executable, str(JOB), *words],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        await_steps(process, tmp_path, 2)
        below = descendants(process.pid)
        process.terminate()
        _, errors = process.communicate(timeout=120)
        left = still_running(below)
    finally:
        if process.poll() is None:
            end(process)

    assert process.returncode == 128 + signal.SIGTERM, errors
    match = re.search(
        r"^stopped by signal 15 after step (\d+); go on with --resume \(save (.*)\)$", errors, re.MULTILINE
    )
    assert match, errors
    assert "Traceback" not in errors
    stopped_at = int(match[1])
    assert 2 <= stopped_at < NUM_STEPS
    assert Path(match[2]) == tmp_path / "saves" / f"step-{stopped_at:08d}"
    assert len(losses(tmp_path)) == stopped_at
    assert not (tmp_path / "summary.json").exists()
    for name in ("raylet", "gcs_server", "RayTrainWorker"):
        assert any(name in command for command in below.values()), f"no {name} was seen: {sorted(below.values())}"
    assert left == {}

    done = run_job(*words)

    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == losses(submitted[0])
    for key in ("first_loss", "final_loss", "eval_loss", "num_steps", "num_plans"):
        assert read_summary(tmp_path)[key] == read_summary(submitted[0])[key], key


def await_steps(process: subprocess.Popen, out: Path, num_steps: int) -> None:
    """Until a running job has written the metrics of that many steps."""
    metrics = out / "metrics.jsonl"
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        if metrics.exists() and len(metrics.read_text("utf-8").splitlines()) >= num_steps:
            return
        if process.poll() is not None:
            pytest.fail(f"the job ended with {process.returncode} before step {num_steps}: {process.stderr.read()}")
        time.sleep(0.05)
    pytest.fail(f"no step {num_steps} in 300 s")


def test_an_address_that_accepts_and_never_answers_is_an_error_with_its_remedy(data: Path, tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as silent:  # Ray takes this machine's own address for a loopback one
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = run_job(*words_of_manifest(data, tmp_path), "--address", address, timeout_s=NO_ANSWER_S)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert f"something listens at {address} and is no Ray cluster" in errors[0]
    assert "--address" in errors[0]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
