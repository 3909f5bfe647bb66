"""Seconds of a step, with communication taking turns with computation or beside it."""

import dataclasses
import random

import numpy as np
import pytest

from osdp_ray.costs import SectionSeconds, beside, overlapped_s, section_seconds, step_seconds
from osdp_ray.costs.streams import late_s
from osdp_ray.planning.choices import DP, HSDP, ZERO2, ZERO3, uniform_sections
from osdp_ray.planning.late import added_among_its_like_s, added_by_column_s, added_s
from tests.random_profiles import base_profile

SHAPE = {"micro_batch": 2, "accumulation": 2}


def part(forward=1.0, backward=2.0, gather=0.0, again=0.0, reduce=0.0):
    return SectionSeconds(
        forward_s=forward,
        backward_s=backward,
        gather_forward_s=gather,
        gather_backward_s=again,
        reduce_s=reduce,
    )


def test_without_communication_a_step_is_its_computing():
    assert overlapped_s([part()] * 3, 0.0, reduces=True) == pytest.approx(9.0)


def test_a_gather_runs_beside_the_section_before_it_and_the_first_beside_nothing():
    assert overlapped_s([part(gather=0.5)] * 3, 0.0, reduces=True) == pytest.approx(9.5)
    assert overlapped_s([part(gather=1.5)] * 3, 0.0, reduces=True) == pytest.approx(1.5 * 3 + 1 + 6)


def test_a_reduction_runs_beside_the_section_behind_it_and_the_last_beside_nothing():
    assert overlapped_s([part(reduce=1.5)] * 3, 0.0, reduces=True) == pytest.approx(9 + 1.5)
    assert overlapped_s([part(reduce=3.0)] * 3, 0.0, reduces=True) == pytest.approx(3 + 2 + 3 * 3)
    assert overlapped_s([part(reduce=3.0)] * 3, 0.0, reduces=False) == pytest.approx(9.0)


def test_on_one_communicator_gathers_wait_for_reductions_and_on_two_they_do_not():
    parts = [part(again=1.2, reduce=1.2)] * 4
    one = overlapped_s(parts, 0.0, reduces=True)
    two = overlapped_s(parts, 0.0, reduces=True, scatter_group="own")
    # backward: nothing hides the first gather and the last reduction; 2.4 s of link beside 2 s of computing between
    assert one == pytest.approx(4 + 1.2 + 2 + 2.4 * 2 + 2 + 1.2)
    assert two == pytest.approx(4 + 1.2 + 2 * 4 + 1.2)


@pytest.mark.parametrize("group", ["shared", "own"])
def test_computing_beside_a_collective_is_slower_but_never_slower_than_in_turns(group):
    parts = [part(gather=0.5, again=0.5, reduce=0.7)] * 5
    seconds = [overlapped_s(parts, slowdown, reduces=True, scatter_group=group) for slowdown in (0.0, 0.25, 0.5)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[2] < sum(p.pass_s(reduces=True) for p in parts)


def test_beside_is_the_longer_of_both_and_what_the_link_slows():
    assert beside(2.0, 1.0, 0.0) == 2.0
    assert beside(2.0, 3.0, 0.25) == 3.0
    assert beside(2.0, 1.0, 0.25) == pytest.approx(2.2)


@pytest.mark.parametrize("choice", [DP, ZERO2, ZERO3])
def test_taking_turns_a_step_is_the_sum_and_beside_it_is_less_but_not_less_than_computing(choice):
    profile = base_profile()
    sections = uniform_sections(profile, choice, "full")
    turns = step_seconds(profile, sections, **SHAPE)
    side = step_seconds(dataclasses.replace(profile, overlaps=True), sections, **SHAPE)
    parts = [
        section_seconds(profile, s.class_index, planned, 2)
        for s, planned in zip(profile.sections, sections, strict=True)
    ]
    whole = 2 * sum(p.pass_s(reduces=True) for p in parts) + sum(p.optimizer_s for p in parts)
    assert sum(turns.values()) == pytest.approx(whole)
    assert turns["forward"] == side["forward"]
    assert turns["backward"] == side["backward"]
    assert 0 <= side["communication"] < turns["communication"]


def test_gradients_that_are_reduced_in_the_last_micro_batch_only_cost_one_reduction():
    profile = base_profile()
    sections = uniform_sections(profile, ZERO3, "none")
    every = sum(step_seconds(profile, sections, **SHAPE).values())
    last = sum(step_seconds(profile, sections, **SHAPE, synchronise="last").values())
    reduction = sum(
        p.reduce_s + p.copy_reduce_s
        for p in (
            section_seconds(profile, s.class_index, planned, 2)
            for s, planned in zip(profile.sections, sections, strict=True)
        )
    )
    assert every - last == pytest.approx(reduction)


def late(backward, late, behind=0.0):
    """A section whose backward computes so long, then starts reductions that end late."""
    return dataclasses.replace(part(forward=0.0, backward=backward), late_reduce_s=late, behind_late_s=behind)


def test_computing_hides_late_reductions_but_for_those_of_the_first_section():
    assert late_s([late(2.0, 1.0)] * 3, 0.0) == 1.0
    assert late_s([late(2.0, 3.0)] * 3, 0.0) == 3.0 + 1.0 + 1.0
    assert late_s([late(2.0, 3.0)] * 3, 0.5) == pytest.approx(3.0 + 6.0 * 0.5 / 1.5)
    assert late_s([late(2.0, 0.0, 1.0)] * 3, 0.5) == 0.0


def test_late_reductions_hold_up_collectives_over_the_world_and_nothing_hides_them_there():
    assert late_s([late(2.0, 0.0), late(2.0, 0.0, 1.0), late(2.0, 1.5)], 0.0) == 1.5
    assert late_s([late(2.0, 0.0, 1.0), late(1.0, 0.0), late(2.0, 1.5)], 0.0) == 0.5
    assert late_s([late(2.0, 1.0, 1.0)] * 4, 0.25) == 4.0


@pytest.mark.parametrize(("choice", "holds_up"), [(ZERO3, True), (ZERO2, True), (HSDP, False), (DP, False)])
def test_only_what_goes_over_the_world_stands_behind_late_reductions(choice, holds_up):
    profile = dataclasses.replace(base_profile(), backend="gloo", ranks_per_node=(2, 2))
    links = tuple(
        dataclasses.replace(link, group=kind)
        for link in profile.links
        if link.group == "world"
        for kind in ("world", "node", "across")
    )
    profile = dataclasses.replace(profile, links=links)
    (block, *_) = [s for s in profile.sections if profile.classes[s.class_index].is_block]
    planned = uniform_sections(profile, choice, "none")[profile.sections.index(block)]
    found = section_seconds(profile, block.class_index, planned, 2)
    assert (found.late_reduce_s > 0) == (choice == DP)
    assert (found.behind_late_s > 0) == holds_up
    if holds_up:
        assert found.behind_late_s == pytest.approx(found.gather_backward_s + found.reduce_s)


@pytest.mark.parametrize("seed", range(20))
def test_late_reductions_of_arrays_are_those_of_sections(seed):
    rng = random.Random(seed)
    slowdown = rng.choice((0.0, 0.4))

    def draw():
        return late(rng.random(), rng.choice((0.0, rng.random(), 3 * rng.random())), rng.choice((0.0, 0.0, 1.0)))

    def arrays(parts):
        return tuple(
            np.array([getattr(p, name) for p in parts]) for name in ("backward_s", "late_reduce_s", "behind_late_s")
        )

    parts, columns = [draw() for _ in range(rng.randint(1, 8))], [draw() for _ in range(5)]
    assert added_s(*arrays(parts), slowdown) == pytest.approx(late_s(parts, slowdown))
    for position in range(len(parts)):
        found = added_by_column_s(position, arrays(columns), arrays(parts), slowdown)
        replaced = [[*parts[:position], column, *parts[position + 1 :]] for column in columns]
        assert found == pytest.approx([late_s(others, slowdown) for others in replaced])
    among = added_among_its_like_s(*arrays(columns), slowdown, is_first=True)
    assert among == pytest.approx([late_s([column], slowdown) for column in columns])
