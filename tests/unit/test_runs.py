"""Long rows of equal sections are played once, and nothing differs from playing every one."""

import dataclasses
import random

import pytest

from osdp_ray.costs.memory import StepSimulator
from osdp_ray.costs.runs import RowSimulator, shortened
from osdp_ray.costs.steps import play_step
from tests.oracle import random_sections
from tests.random_profiles import random_profile


@pytest.mark.parametrize("seed", range(12))
def test_a_row_played_once_holds_what_every_one_of_its_sections_would(seed):
    rng = random.Random(seed)
    profile = random_profile(rng, max_layers=4, merge=rng.random() < 0.5)
    backend = rng.choice(("gloo", "nccl"))
    profile = dataclasses.replace(
        profile,
        ranks_per_node=rng.choice(((4,), (2, 2), (3, 3))),
        precision=rng.choice(("fp32", "bf16")),
        backend=backend,
        device_kind="cpu" if backend == "gloo" else "cuda",
    )
    sections, described = [], []
    for planned, section in zip(random_sections(profile, rng), profile.sections, strict=True):
        times = rng.choice((1, 8, 13)) if planned.is_block else 1
        sections += [planned] * times
        described += [section] * times
    profile = dataclasses.replace(profile, sections=tuple(described))
    classes = tuple(section.class_index for section in described)
    for accumulation, synchronise in ((1, "every"), (3, "every"), (2, "last"), (5, "last")):
        one, other = (
            play_step(kind(profile, tuple(sections), classes), 2, accumulation, synchronise)
            for kind in (StepSimulator, RowSimulator)
        )
        assert one == other


def test_short_rows_are_left_as_they_are_and_long_ones_have_one_that_stands_for_many():
    class Planned:
        recompute, units = "none", ()

    rows = shortened([Planned()] * 20, [0] * 5 + [1] * 15)
    assert [row.times for row in rows] == [1] * 5 + [1, 1, 1, 9, 1, 1, 1]
    assert [row.first for row in rows] == [*range(5), 5, 6, 7, 8, 17, 18, 19]
