"""Unequal nodes: the profile says who is slow, and what FSDP2 and a pass take beside computing is in the prediction."""

import dataclasses

import pytest

from osdp_ray.costs import step_seconds, table_of
from osdp_ray.errors import ClusterError
from osdp_ray.modeling.structure import Structure
from osdp_ray.planning.choices import DP, HSDP, ZERO2, ZERO3, uniform_sections
from osdp_ray.profiling import _slowest_compute
from osdp_ray.profiling.compute import _median_run, fit_cost, fit_line
from osdp_ray.profiling.hooks import ChainSeconds, pass_overhead, unit_overhead
from osdp_ray.profiling.interfaces import choose_interface
from osdp_ray.records.nodes import NodeSpeed, node_table, slow_nodes
from osdp_ray.records.overheads import PassOverhead, UnitOverhead
from osdp_ray.records.profile import Profile, Section
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
        shard_over=shard_over,
        gather_s=scale * 1.0,
        gather_s_per_tensor=scale * 0.01,
        gather_s_per_byte=scale * 1e-4,
        reduce_s=scale * 2.0,
        reduce_s_per_tensor=scale * 0.1,
        reduce_s_per_byte=scale * 1e-3,
    )
    for shard_over, scale in (("none", 1.0), ("world", 10.0), ("node", 100.0))
)


def test_what_fsdp2_takes_for_its_units_is_in_the_step():
    bare = Profile.load(PROFILE)
    with_hooks = dataclasses.replace(bare, unit_overheads=OVERHEADS)

    def more(choice):
        return total_s(with_hooks, choice) - total_s(bare, choice)

    sections = uniform_sections(bare, ZERO2, "none")
    num_units = sum(len(section.units) for section in sections)
    num_tensors = sum(len(bare.classes[s.class_index].parameters) for s in bare.sections)
    sizes = [
        table_of(bare).unit_bytes(described.class_index, unit)
        for section, described in zip(sections, bare.sections, strict=True)
        for unit in section.units
    ]
    gather_s = 1.0 * num_units + 0.01 * num_tensors
    reduce_s = 2.0 * num_units + 0.1 * num_tensors
    flat_s = 1e-4 * sum(size.flat_bytes for size in sizes)
    reduced_s = 1e-3 * sum(size.reduce_bytes for size in sizes)
    assert flat_s > 0
    assert more(ZERO2) == pytest.approx(10 * (gather_s + flat_s + reduce_s + reduced_s))
    assert more(ZERO3) == pytest.approx(more(ZERO2) + 10 * (gather_s + flat_s))
    assert more(DP) == pytest.approx(2 * gather_s + reduce_s)  # makes its parameters ready again in backward


def test_units_shared_inside_nodes_have_an_overhead_of_their_own():
    inside = dataclasses.replace(
        Profile.load(PROFILE),
        ranks_per_node=(2, 2),
        links=tuple(
            dataclasses.replace(link, group=kind)
            for link in Profile.load(PROFILE).links
            if link.group == "world"
            for kind in ("world", "node", "across")
        ),
    )
    overheads = {own.shard_over: own for own in OVERHEADS}

    def more(kind, choice):
        return total_s(dataclasses.replace(inside, unit_overheads=(overheads[kind],)), choice) - total_s(inside, choice)

    assert more("node", HSDP) > 0
    assert more("world", HSDP) == more("node", ZERO3) == 0
    assert more("node", HSDP) == pytest.approx(10 * more("world", ZERO3))


def test_a_pass_and_a_step_take_their_constants_once():
    bare = Profile.load(PROFILE)
    with_pass = dataclasses.replace(bare, pass_overhead=PassOverhead(pass_s=3.0, sample_s=0.5))
    with_step = dataclasses.replace(bare, optimizer=dataclasses.replace(bare.optimizer, step_constant_s=7.0))
    for accumulation in (1, 3):
        plain_s = total_s(bare, ZERO3, accumulation=accumulation)
        assert total_s(with_pass, ZERO3, accumulation=accumulation) == pytest.approx(plain_s + 3.5 * accumulation)
        assert total_s(with_step, ZERO3, accumulation=accumulation) == pytest.approx(plain_s + 7.0)


@pytest.mark.parametrize("truth", OVERHEADS, ids=["replicated", "world", "node"])
def test_chains_of_units_give_back_what_they_were_made_of(truth):
    copy_bytes_per_s = 5e3

    def chain(num_tensors, num_bytes, others_s=0.0):
        return ChainSeconds(
            shard_over=truth.shard_over,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            gather_s=others_s + truth.gathering_s(num_tensors, num_bytes) + num_bytes / copy_bytes_per_s,
            reduce_s=others_s + truth.reducing_s(num_tensors, num_bytes) + num_bytes / copy_bytes_per_s,
        )

    chains = [chain(1, 16), chain(9, 16)]
    found = unit_overhead(chains, copy_bytes_per_s)
    assert (found.gather_s_per_byte, found.reduce_s_per_byte) == (0.0, 0.0)
    assert found.gathering_s(5, 0) == pytest.approx(chain(5, 16).gather_s)
    assert found.reducing_s(5, 0) == pytest.approx(chain(5, 16).reduce_s)

    found = unit_overhead([*chains, chain(1, 16, 3.0), chain(1, 4096, 3.0)], copy_bytes_per_s)
    assert found.gather_s_per_byte == pytest.approx(truth.gather_s_per_byte)
    assert found.reduce_s_per_byte == pytest.approx(truth.reduce_s_per_byte)
    assert found.reducing_s(9, 16) == pytest.approx(chain(9, 16).reduce_s)


def test_no_part_of_an_overhead_is_below_zero():
    few = ChainSeconds(shard_over="world", num_bytes=16, num_tensors=1, gather_s=-1.0, reduce_s=2.0)
    many = dataclasses.replace(few, num_tensors=9, gather_s=-2.0, reduce_s=1.0)
    large = dataclasses.replace(few, num_bytes=4096, gather_s=-3.0)
    found = dataclasses.asdict(unit_overhead([few, many, few, large], 1e9))
    assert found.pop("shard_over") == "world"
    assert found.pop("reduce_s") == 2.0
    assert set(found.values()) == {0.0}


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
