"""The families of models that plans are compared on."""

import pytest
import torch

from osdp_ray.catalogue import load_hardware
from osdp_ray.errors import InfeasibleError, UsageError
from osdp_ray.planning import plan
from osdp_ray.profiling import estimate
from osdp_ray.units import KIB
from osdp_ray.workloads.families import FAMILIES, FamilyWorkload, Stage, family


def test_the_families_have_the_sizes_that_their_module_names():
    sizes = {name: [(stage.layers, stage.hidden) for stage in stages] for name, stages in FAMILIES.items()}
    assert sizes == {"narrow": [(48, 2048)], "wide": [(4, 8192)], "mixed": [(16, 1024), (16, 2048), (8, 4096)]}
    assert family("narrow").layers == 48


def test_a_model_of_several_widths_runs_and_widens_once_per_stage():
    workload = FamilyWorkload((Stage(layers=2, hidden=64), Stage(layers=2, hidden=128)), sequence=8)
    model = workload.build_model()
    assert sum(type(block).__name__ == "WideningBlock" for block in model.blocks) == 1
    logits = model(torch.zeros(2, 8, dtype=torch.long))
    assert logits.shape == (2, 8, workload.vocabulary)
    assert torch.isfinite(logits).all()
    assert workload.hash() != FamilyWorkload((Stage(layers=4, hidden=64),), sequence=8).hash()


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"no family is called 'deep'\. Use name=narrow, wide, mixed"):
        family("deep")


@pytest.mark.parametrize("budget_bytes", [1, KIB, 64 * KIB])
def test_a_budget_far_below_any_plan_is_told_like_any_other(budget_bytes):
    """In units of such a budget what plans hold would be a number too large for solvers."""
    wide = estimate(FamilyWorkload((Stage(layers=2, hidden=384),), sequence=64), load_hardware("4x-rtx4090-1gbit"))

    with pytest.raises(InfeasibleError, match="no plan fits"):
        plan(wide, budget_bytes=budget_bytes, global_batch=16)
