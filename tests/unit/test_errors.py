"""Errors survive the trip between processes and say what to do."""

import inspect
import pickle

import pytest

from osdp_ray import errors
from osdp_ray.errors import (
    DivergedError,
    InfeasibleError,
    Interrupted,
    OsdpError,
    PlanMismatchError,
    WorkerError,
    WorkerMemoryError,
)
from osdp_ray.units import GIB, parse_bytes

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OsdpError)]
CLASSES = sorted((kind for kind in KINDS if kind is not OsdpError), key=lambda kind: kind.__name__)


def example(kind):
    """An instance whose facts are made up from the annotations of its constructor."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return kind(*(GIB + index if p.annotation is int else f"fact-{index}" for index, p in enumerate(parameters)))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickle_with_its_facts_and_its_text(kind):
    error = example(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), vars(copy), copy.args) == (str(error), vars(error), error.args)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_text_of_an_error_holds_every_text_that_it_was_given(kind):
    error = example(kind)
    for value in vars(error).values():
        assert not isinstance(value, str) or value in str(error)


def test_an_infeasible_budget_names_both_sizes_the_phase_the_holder_and_a_budget_that_is_enough():
    error = InfeasibleError(16 * GIB, 19756849562, "loss", "lm_head", 4)
    assert str(error) == (
        "no plan fits in 16.00 GiB per device: the leanest one peaks at 18.40 GiB in the loss phase, 2.40 GiB too "
        "much, and 'lm_head' is the largest operator there. Raise --memory-budget to at least 18.41GiB, lower "
        "--micro-batch (it is 4), or add workers."
    )
    assert "lower --micro-batch" not in str(InfeasibleError(16 * GIB, 19756849562, "loss", "lm_head", 1))
    assert parse_bytes("18.41GiB") >= error.leanest_bytes


def test_a_worker_error_names_the_rank_where_it_is_known():
    assert str(WorkerError(3, "it died", "Look at its log.")) == "worker 3 failed: it died. Look at its log."
    assert str(WorkerError(-1, "they died", "Retry.")).startswith("the workers failed")
    assert str(WorkerMemoryError(1, "2 GiB asked", "Lower --memory-budget.")).startswith("worker 1 ran out of memory")
    assert str(WorkerMemoryError(-1, "x", "y")).startswith("a worker ran out of memory")


def test_a_foreign_plan_is_answered_with_planning_again():
    assert "Plan again for this model and cluster (osdp plan)" in str(PlanMismatchError("ranks", "4", "2"))


def test_a_divergence_names_the_step_the_remedy_and_the_save_to_go_on_from():
    assert str(DivergedError(7, "the loss is nan", "runs/a/saves/step-00000004")) == (
        "training diverged: the loss is nan in step 7. Lower the learning rate, or look in the data and the loss for "
        "what is not finite; runs/a/saves/step-00000004 is whole and --resume goes on from it."
    )
    assert str(DivergedError(7, "the loss is nan", "")).endswith("; nothing is saved.")


def test_an_interruption_says_how_to_go_on():
    assert "go on with --resume (save runs/a)" in str(Interrupted(15, 7, "runs/a"))
    assert "start again" in str(Interrupted(2, 0, ""))
