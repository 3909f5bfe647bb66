"""Solvers that are missing, fail or end before they are done."""

import pulp
import pytest

from osdp_ray.errors import SolverError
from osdp_ray.planning import plan, solvers
from osdp_ray.planning.solvers import run_solver
from osdp_ray.units import MIB
from tests.random_profiles import base_profile, merged


def knapsack(num=30):
    """More of a search than a node is enough for."""
    model = pulp.LpProblem("knapsack", pulp.LpMinimize)
    chosen = [model.add_variable(f"x{i}", 0, 1, cat="Binary") for i in range(num)]
    for row in range(6):
        model += pulp.lpSum((17 + (i * 7 + row * 5) % 23) * x for i, x in enumerate(chosen)) <= 301.5
    model.setObjective(pulp.lpSum(-(19 + (i * 11) % 17) * x for i, x in enumerate(chosen)))
    return model


def test_without_any_solver_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(solvers._Highs, "available", lambda _: False)
    monkeypatch.setattr(solvers, "_cbc", lambda *_: None)
    with pytest.raises(SolverError, match=r"solver HiGHS and CBC: not installed\. pip install highspy"):
        run_solver(knapsack(), is_integer=True)


def test_where_highs_is_missing_cbc_finds_a_plan(monkeypatch):
    monkeypatch.setattr(solvers._Highs, "available", lambda _: False)
    profile = merged(base_profile())
    made = plan(profile, budget_bytes=20 * MIB, global_batch=16)
    assert made.solver.solver in ("CBC", "none needed")
    assert made.prediction.peak_bytes <= 20 * MIB


def test_a_solver_that_fails_is_named_with_its_reason_and_the_remedy(monkeypatch):
    def fails(*_):
        raise pulp.PulpSolverError("it was killed")

    monkeypatch.setattr(pulp.LpProblem, "solve", fails)
    with pytest.raises(SolverError, match=r"solver HiGHS: it failed \(it was killed\)\. Install another one"):
        run_solver(knapsack(), is_integer=True)


def test_a_program_without_a_bound_is_an_error_with_its_status():
    model = pulp.LpProblem("endless", pulp.LpMinimize)
    model.setObjective(-model.add_variable("x", 0))
    with pytest.raises(SolverError, match=r"it ended as '.*'\. Raise the budget a little, or install another solver"):
        run_solver(model, is_integer=False)


@pytest.mark.parametrize("solver", ["HiGHS", "CBC"])
def test_a_search_that_ends_at_its_limit_claims_no_more_than_it_proved(solver, monkeypatch):
    monkeypatch.setenv("OSDP_SOLVER", solver)
    limited = run_solver(knapsack(), is_integer=True, max_nodes=1)
    best = run_solver(knapsack(), is_integer=True, max_nodes=100_000)
    assert best.bound == pytest.approx(best.value, rel=1e-6)
    assert limited.bound <= best.value + 1e-6
    assert limited.value >= best.value - 1e-6


def test_a_plan_whose_search_found_nothing_in_its_limits_is_no_worse_than_the_best_uniform_one(monkeypatch):
    nothing = solvers.Outcome(value=float("inf"), bound=float("-inf"), solver="HiGHS")
    run = run_solver
    monkeypatch.setattr(
        "osdp_ray.planning.program.run_solver",
        lambda model, **words: nothing if words["is_integer"] else run(model, **words),
    )
    made = plan(base_profile(), budget_bytes=20 * MIB, global_batch=16)
    assert made.solver.status == "feasible"
    assert made.solver.gap_fraction > 0
    assert made.prediction.samples_per_s >= max(other.samples_per_s or 0.0 for other in made.alternatives)
