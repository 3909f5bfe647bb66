"""Unequal nodes: the profile says who is slow, and what FSDP2 and a pass take beside computing is in the prediction."""

import dataclasses

import pytest

from osdp_ray.costs import step_seconds
from osdp_ray.errors import ClusterError
from osdp_ray.modeling.structure import Structure
from osdp_ray.planning.choices import DP, ZERO2, ZERO3, uniform_sections
from osdp_ray.profiling import _slowest_compute
from osdp_ray.profiling.compute import _median_run, fit_cost, fit_line
from osdp_ray.profiling.hooks import ChainSeconds, _overhead, pass_overhead
from osdp_ray.profiling.interfaces import choose_interface
from osdp_ray.records.nodes import NodeSpeed, node_table, slow_nodes
from osdp_ray.records.profile import LinkCost, PassOverhead, Profile, Section, UnitOverhead
from osdp_ray.units import GIB
from tests.regenerate_golden import PROFILE


def node(number, **different):
    facts = {
        "address": f"10.0.0.{number}",
        "hostname": f"n{number}",
        "num_ranks": 2,
        "memory_bytes": 16 * GIB,
        "compute_s": 0.1,
        "link_bytes_per_s": 1e9,
        "clock_offset_s": 0.0,
    }
    return NodeSpeed(**{**facts, **different})


def test_equal_nodes_are_not_called_slow():
    assert slow_nodes((node(1), node(2, compute_s=0.11, link_bytes_per_s=0.9e9), node(3))) == ()
    assert slow_nodes(()) == ()
    assert node_table(()) == ""


def test_the_slowest_and_the_smallest_are_named_the_worst_first():
    nodes = (node(1), node(2, compute_s=0.2), node(3, compute_s=0.3, memory_bytes=8 * GIB), node(4))
    memory, compute = slow_nodes(nodes)
    assert memory == "node n3 (10.0.0.3): the least memory, 8.00 GiB, bounds all"
    assert compute.startswith("node n3 (10.0.0.3), node n2 (10.0.0.2): computes 3.0 times as long as n1")
    (link,) = slow_nodes((node(1), node(2, link_bytes_per_s=0.25e9), node(3)))
    assert link == "node n2 (10.0.0.2): link 4.0 times as slow as n1's; the rings wait"
    assert link in node_table((node(1), node(2, link_bytes_per_s=0.25e9), node(3)))


def test_a_single_node_has_no_link():
    assert slow_nodes((node(1, link_bytes_per_s=None),)) == ()
    assert "  -" in node_table((node(1, link_bytes_per_s=None),))


def total_s(profile, choice, *, accumulation=1):
    sections = uniform_sections(profile, choice, "none")
    return sum(step_seconds(profile, sections, micro_batch=1, accumulation=accumulation).values())


OVERHEADS = tuple(
    UnitOverhead(
        is_sharded=is_sharded,
        forward_s=scale * 1.0,
        forward_s_per_tensor=scale * 0.01,
        regather_s=scale * 0.5,
        regather_s_per_tensor=0.0,
        backward_s=scale * 2.0,
        backward_s_per_tensor=scale * 0.1,
    )
    for is_sharded, scale in ((False, 1.0), (True, 10.0))
)


def test_what_fsdp2_takes_for_its_units_is_in_the_step():
    bare = Profile.load(PROFILE)
    with_hooks = dataclasses.replace(bare, unit_overheads=OVERHEADS)
    sections = uniform_sections(bare, ZERO2, "none")
    num_units = sum(len(section.units) for section in sections)
    num_tensors = sum(len(bare.classes[s.class_index].parameters) for s in bare.sections)

    def more(choice):
        return total_s(with_hooks, choice) - total_s(bare, choice)

    assert more(ZERO2) == pytest.approx(10 * (3.0 * num_units + 0.11 * num_tensors))
    assert more(ZERO3) == pytest.approx(more(ZERO2) + 10 * 0.5 * num_units)
    assert more(DP) == pytest.approx(3.5 * num_units + 0.11 * num_tensors)  # copies its parameters again in backward


def test_a_pass_and_a_step_take_their_constants_once():
    bare = Profile.load(PROFILE)
    with_pass = dataclasses.replace(bare, pass_overhead=PassOverhead(pass_s=3.0, sample_s=0.5))
    with_step = dataclasses.replace(bare, optimizer=dataclasses.replace(bare.optimizer, step_constant_s=7.0))
    for accumulation in (1, 3):
        plain_s = total_s(bare, ZERO3, accumulation=accumulation)
        assert total_s(with_pass, ZERO3, accumulation=accumulation) == pytest.approx(plain_s + 3.5 * accumulation)
        assert total_s(with_step, ZERO3, accumulation=accumulation) == pytest.approx(plain_s + 7.0)


@pytest.mark.parametrize("truth", OVERHEADS, ids=["replicated", "sharded"])
def test_chains_of_small_units_give_back_what_they_were_made_of(truth):
    is_sharded, slowdown = truth.is_sharded, 1.5
    gather, scatter, reduce = links = tuple(
        LinkCost(group="world", collective=name, latency_s=latency_s, bytes_per_s=1e6, residual_fraction=0.0)
        for name, latency_s in (("all_gather", 0.02), ("reduce_scatter", 0.03), ("all_reduce", 0.04))
    )
    chains = {}
    for regather in (False, True):
        for number in (1, 9):
            num_bytes = 16 * number
            gather_s = gather.seconds(num_bytes) if is_sharded else 0.0
            # computing hides the reduction of a replicated unit, but for what it is slowed
            hidden = 1.0 if is_sharded else slowdown / (1 + slowdown)
            reduce_s = (scatter if is_sharded else reduce).seconds(num_bytes) * hidden
            again = truth.regather_s + number * truth.regather_s_per_tensor + gather_s
            chains[is_sharded, regather, number] = ChainSeconds(
                num_bytes=num_bytes,
                forward_s=truth.forward_s + number * truth.forward_s_per_tensor + gather_s,
                backward_s=truth.backward_s
                + number * truth.backward_s_per_tensor
                + reduce_s
                + (again if regather else 0.0),
            )

    found = dataclasses.asdict(_overhead(chains, is_sharded, links, slowdown))

    assert found == pytest.approx(dataclasses.asdict(truth), abs=1e-9)


def test_making_batches_is_the_slowest_ranks_line():
    found = pass_overhead(0.5, [{1: 0.1, 2: 0.2, 4: 0.4}, {1: 0.3, 2: 0.4, 4: 0.6}])
    assert (found.pass_s, found.sample_s) == pytest.approx((0.7, 0.1))


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 3.0), (2, 5.0), (8, 17.0)], (1.0, 2.0)),
        ([(4, 8.0)], (0.0, 2.0)),
        ([(1, 1.0), (2, 4.0)], (0.0, 1.5)),  # no constant below zero
        ([(1, 3.0), (2, 1.0)], (2.6, 0.0)),  # nothing gets faster with more samples
    ],
)
def test_seconds_are_a_line_in_the_micro_batch(points, line):
    assert fit_line(points) == pytest.approx(line)


def test_an_interface_that_is_not_there_is_named_with_the_one_to_use(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(ClusterError, match=r"'nosuch0' on node .*no such interface.*set it to 'lo'"):
        choose_interface("127.0.0.1")


def structure_of(*class_of_section):
    sections = tuple(Section(name=str(i), class_index=index) for i, index in enumerate(class_of_section))
    return Structure(classes=(), sections=sections)


def test_what_is_in_the_way_of_another_class_in_every_run_still_counts():
    """Three runs of three classes, each held up by 10 s in a class of its own: no median has seen it, every run has."""
    runs = [[(11.0 if held == index else 1.0, 1.0) for index in range(3)] for held in range(3)]

    found = _median_run(structure_of(0, 1, 2), runs)

    assert sum(forward_s + backward_s for forward_s, backward_s in found) == pytest.approx(16.0)
    assert found[0] == found[1] == found[2]


def test_the_slowest_rank_is_one_rank_and_not_the_slowest_of_each_class():
    def rank(*seconds):
        return [fit_cost(index, [(8, taken_s)], [(8, taken_s)], [(8, 0.0)]) for index, taken_s in enumerate(seconds)]

    ranks = [rank(3.0, 1.0), rank(1.0, 2.0)]

    assert _slowest_compute(structure_of(0, 1), ranks) == tuple(ranks[0])
    assert _slowest_compute(structure_of(0, 1, 1, 1), ranks) == tuple(ranks[1])
