"""What slices are for: a model with one huge operator, in 1, 2, 4 and 8 slices, measured against predicted."""

import dataclasses
import functools

import pytest
import torch.nn.functional as F
from torch import nn

from osdp_ray.costs import simulate_bytes
from osdp_ray.errors import InfeasibleError
from osdp_ray.planning import plan
from osdp_ray.planning.choices import ZERO3, group_units, uniform_sections, with_slices
from osdp_ray.profiling.trace import trace
from osdp_ray.records.plan import slice_name
from tests.models import Built, Layer
from tests.oracle import make_plan, measure, traced_profile

HUGE = "huge"  # of 4 MiB
COUNTS = (1, 2, 4, 8)


class Huge(nn.Module):
    """Two small blocks, and behind them a huge operator between two small ones."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.up, self.huge, self.down = nn.Linear(32, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.down(F.gelu(self.huge(F.gelu(self.up(x)))))


@functools.cache
def workload_and_profile():
    workload = Built(Huge, shape=(2, 32))
    return workload, traced_profile(workload, trace(workload), ranks_per_node=(8,))


def in_slices(profile, num_slices):
    """ZeRO-3, the huge operator in so many slices."""
    sections = []
    for section, chosen in zip(profile.sections, uniform_sections(profile, ZERO3, "none"), strict=True):
        section_class = profile.classes[section.class_index]
        names = [
            slice_name(operator.name, j, num_slices)
            for operator in section_class.operators
            if operator.name == HUGE and num_slices > 1
            for j in range(num_slices)
        ]
        cut = with_slices(section_class, names)
        units = [
            unit
            for operator in cut.operators
            for unit in group_units(dataclasses.replace(cut, operators=(operator,)), {operator.name: ZERO3})
        ]
        sections.append(dataclasses.replace(chosen, units=tuple(units)))
    return make_plan(profile, tuple(sections), micro_batch=1, accumulation=1)


def test_the_peak_falls_with_the_number_of_slices_as_predicted():
    workload, profile = workload_and_profile()
    plans = [in_slices(profile, num_slices) for num_slices in COUNTS]

    predicted = [simulate_bytes(profile, made).peak_bytes for made in plans]
    measured = [measure(workload, made).peak_bytes for made in plans]

    assert predicted == measured
    assert measured == sorted(measured, reverse=True)
    whole_bytes = 4 * 1024 * 1024
    assert measured[0] - measured[-1] > whole_bytes  # of what a whole one holds, gathered and as a gradient


def test_a_model_that_cannot_train_unsplit_at_a_budget_trains_split():
    workload, profile = workload_and_profile()
    whole = tuple(
        dataclasses.replace(c, operators=tuple(dataclasses.replace(o, can_split=False) for o in c.operators))
        for c in profile.classes
    )
    unsplit = dataclasses.replace(profile, classes=whole)
    with pytest.raises(InfeasibleError) as caught:
        plan(unsplit, budget_bytes=1024 * 1024, micro_batch=1)
    budget_bytes = caught.value.leanest_bytes - 1024 * 1024

    with pytest.raises(InfeasibleError):
        plan(unsplit, budget_bytes=budget_bytes, micro_batch=1)
    made = plan(profile, budget_bytes=budget_bytes, micro_batch=1)

    assert any(section.splits for section in made.sections)
    assert measure(workload, made).peak_bytes == made.prediction.peak_bytes <= budget_bytes
