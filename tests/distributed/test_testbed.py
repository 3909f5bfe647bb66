"""The test bed, and profiling on it: three nodes of one rank with links of their own; what is slow, blocked or gone.

The tests share one bed and go from what leaves it whole to what does not.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import TestBed, TestBedError, cpus, missing_requirement, remove_leftovers
from cluster.processes import members, start_ticks

from osdp_ray.profiling.actors import MOST_CLOCK_OFFSET_S
from osdp_ray.records.profile import Profile

pytestmark = pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))

DRIVER = str(Path(__file__).with_name("bed_driver.py"))
MOST_S = 60.0
# A clock of its own for every Python process that finds this on its path.
OTHER_CLOCK = f"import time\n_time = time.time\ntime.time = lambda: _time() + {MOST_CLOCK_OFFSET_S + 240}\n"


@pytest.fixture(scope="module")
def bed():
    with TestBed(num_nodes=3, slots_per_node=1, link_mbit=200) as up:
        yield up


def drive(bed, *words, timeout_s=150):
    done = bed.run(0, [sys.executable, DRIVER, *words], timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def measuring_actors(bed):
    """Processes of measuring actors on any node that still runs."""
    found = []
    for index in range(bed.num_nodes):
        if bed.node(index).is_running:
            for pid in members(bed.node(index).pid):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"_Measurer" in words:
                    found.append((index, pid))
    return found


def assert_no_actor_stays(bed):
    deadline_s = time.monotonic() + 20
    while measuring_actors(bed) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert measuring_actors(bed) == []


def test_every_node_has_an_address_of_its_own(bed):
    assert sorted(drive(bed, "addresses")["found"]) == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]


def test_the_ring_scatter_sends_what_a_gather_sends_and_half_of_what_gloo_sends(bed):
    for sent, difference in drive(bed, "bytes")["found"]:
        assert difference < 1e-5
        assert sent["ring"] == pytest.approx(sent["gather"], rel=0.1)
        assert sent["own"] > 1.7 * sent["ring"]


def test_a_profile_names_the_node_whose_link_and_cores_are_slow(bed, tmp_path):
    bed.shape(20, 2)
    bed.limit_cpus(2, 0.25)
    try:
        found = drive(bed, "profile", str(tmp_path / "profile.json"), timeout_s=300)
    finally:
        bed.shape(200, 2)
        bed.limit_cpus(2, None)

    assert "error" not in found, found
    profile = Profile.load(tmp_path / "profile.json")
    slow = profile.slow_nodes()
    assert profile.nodes[0].address == "10.77.0.1", "the driver's node comes first, the others by Ray's random names"
    assert {node.address for node in profile.nodes} == {"10.77.0.1", "10.77.0.2", "10.77.0.3"}
    assert any("node node2 (10.77.0.3)" in text and ": link" in text for text in slow), slow
    assert any("node node2 (10.77.0.3)" in text and "computes" in text for text in slow), slow
    assert all(text in found["found"]["table"] for text in slow)
    assert {own.shard_over for own in profile.unit_overheads} == {"none", "world"}
    assert all(link.residuals for link in profile.links)
    assert_no_actor_stays(bed)


def test_nodes_that_cannot_reach_one_another_are_named(bed):
    bed.cut(1, 2)
    try:
        found = drive(bed, "start")
    finally:
        bed.mend(1, 2)

    ways = (
        "node node1 (10.77.0.2) cannot reach 10.77.0.3: port",
        "node node2 (10.77.0.3) cannot reach 10.77.0.2: port",
    )
    assert any(way in found["error"] for way in ways), found  # whichever Ray lists first
    assert "was tried" in found["error"]
    assert "Open the ports between these nodes" in found["error"]
    assert found["seconds"] < MOST_S
    assert_no_actor_stays(bed)


def test_an_interrupted_profile_leaves_no_actor(bed, tmp_path):
    begun = tmp_path / "begun"
    process = bed.node(0).popen(
        [sys.executable, DRIVER, "sleep", str(begun)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline_s = time.monotonic() + 90
    while not begun.exists() and time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(0.1)
    assert begun.exists()
    assert len(measuring_actors(bed)) == 3

    for pid in members(bed.node(0).pid):
        if DRIVER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGINT)

    assert process.wait(60) != 0
    assert_no_actor_stays(bed)


def test_a_node_with_a_clock_of_its_own_is_named(bed, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OTHER_CLOCK)
    bed.kill_node(2)
    bed.start_node(2, env={"PYTHONPATH": os.pathsep.join((str(tmp_path), bed.node(0).env["PYTHONPATH"]))})

    found = drive(bed, "start")

    assert "the clock of node node2 (10.77.0.3, rank" in found["error"], found
    assert "ahead of the driver's" in found["error"]
    assert "NTP" in found["error"]
    assert found["seconds"] < MOST_S
    assert_no_actor_stays(bed)


def test_a_node_with_an_interface_that_reaches_nobody_is_named(bed):
    bed.kill_node(2)
    bed.start_node(2, env={"GLOO_SOCKET_IFNAME": "lo"})

    found = drive(bed, "start")

    assert "GLOO_SOCKET_IFNAME is 'lo' on node node2 (10.77.0.3), which is 127.0.0.1" in found["error"], found
    assert "set it to 'eth0'" in found["error"]
    assert found["seconds"] < MOST_S
    assert_no_actor_stays(bed)


def test_a_node_that_falls_silent_while_measuring_is_named(bed, tmp_path):
    bed.kill_node(2)
    bed.start_node(2)
    begun = tmp_path / "begun"
    process = bed.node(0).popen(
        [sys.executable, DRIVER, "sleep", str(begun)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 90
    while not begun.exists() and time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(0.1)
    time.sleep(1.0)
    bed.freeze(2)
    try:
        out, errors = process.communicate(timeout=MOST_S)
        found = json.loads(out.splitlines()[-1])
        never = drive(bed, "start")  # the same node does not answer from the start
    finally:
        bed.freeze(2, is_frozen=False)

    assert "node node2 (10.77.0.3, rank" in found["error"], errors
    assert "no sign of life for 20 s" in found["error"] or "was lost" in found["error"]
    # By now Ray may have given the node up, and then it is in no cluster any more.
    assert never.get("found") == 2 or "node node2 (10.77.0.3, rank" in never["error"]
    assert never["seconds"] < MOST_S


def test_a_bed_ends_with_its_owner_and_what_is_left_is_removed():
    script = (
        "import sys, time; from cluster import TestBed\n"
        "with TestBed(num_nodes=1, slots_per_node=1, name='orphan') as bed:\n"
        "    print(bed.node(0).pid, flush=True); time.sleep(300)\n"
    )
    root = Path(__file__).resolve().parents[2] / "benchmarks"
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    pid = int(owner.stdout.readline())
    assert start_ticks(pid) is not None
    inside = members(pid)

    owner.kill()
    owner.wait()

    deadline_s = time.monotonic() + 20
    while any(start_ticks(member) is not None for member in inside) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert [member for member in inside if start_ticks(member) is not None] == []
    assert "orphan" in remove_leftovers()
    assert remove_leftovers() == []
    assert not [group for root in cpus.ROOTS for group in root.glob("osdp-orphan-*")]


def test_a_bed_that_cannot_be_changed_says_why(bed):
    with pytest.raises(TestBedError, match=r"no node 7\. It has 0, 1, 2"):
        bed.shape(100, 7)
    with pytest.raises(TestBedError, match=r"cannot run on -1 cores.*above 0"):
        bed.limit_cpus(0, -1)
    with pytest.raises(TestBedError, match=r"node 0 runs.*Kill it first"):
        bed.start_node(0)
