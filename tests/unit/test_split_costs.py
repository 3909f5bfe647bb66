"""What splitting makes of classes, traces, names and menus; bytes are held against the allocator in tests/property."""

import dataclasses

import pytest

from osdp_ray.costs import predict_sections, split_class, splits_of, splittable
from osdp_ray.costs.splitting import split_trace
from osdp_ray.planning.choices import DP, ZERO2, ZERO3, group_units, large_operators, split_assignments, with_slices
from osdp_ray.records.plan import SectionPlan, parse_slice, short_names, slice_name
from osdp_ray.records.profile import ALLOC, ENTER, EXIT, GRADIENT, POST_BACKWARD, PRE_BACKWARD, WORKSPACE
from tests.random_profiles import base_profile

UP, DOWN = 4, 5  # operators of the golden profile's blocks


@pytest.fixture
def profile():
    found = base_profile()
    block = found.classes[1]
    operators = [
        dataclasses.replace(operator, can_split=operator.kind in ("Linear", "Embedding"))
        for operator in block.operators
    ]
    classes = (found.classes[0], dataclasses.replace(block, operators=tuple(operators)), found.classes[2])
    return dataclasses.replace(found, classes=classes)


def events(row):
    return [row[i : i + 5] for i in range(0, len(row), 5)]


def test_names_of_slices_are_read_back_and_shortened():
    names = [slice_name("mlp.up", i, 4) for i in range(4)]
    assert names[1] == "mlp.up#1/4"
    assert [parse_slice(name) for name in ("norm", names[3])] == [("norm", 0, 1), ("mlp.up", 3, 4)]
    assert short_names(("norm", *names)) == ("norm", "mlp.up in 4 slices")
    assert short_names((names[0], names[1])) == ("mlp.up slices 1-2 of 4",)
    assert short_names((names[3],)) == ("mlp.up slice 4 of 4",)


def test_a_class_has_a_slice_for_an_operator_and_keeps_all_of_its_bytes(profile):
    block = profile.classes[1]
    cut = split_class(block, ((UP, 4),))
    names = [operator.name for operator in cut.section_class.operators]
    assert names[UP : UP + 5] == [*(f"mlp.up#{i}/4" for i in range(4)), "mlp.down"]
    assert cut.section_class.parameter_bytes == block.parameter_bytes
    first, second = cut.section_class.operators[UP : UP + 2]
    shapes = [[cut.section_class.parameters[i].shape for i in o.parameters] for o in (first, second)]
    assert shapes == [[(512, 32), (512,)], [(512, 32)]]
    assert first.modules == ("mlp.up.slices.0",)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_trace_runs_slices_in_turn_and_makes_their_gradients_one_by_one(profile, recompute):
    block, trace = profile.classes[1], profile.trace(1, recompute)
    cut = split_class(block, ((UP, 2),))
    subjects = [cut.subjects[f"mlp.up#{i}/2"] for i in range(2)]
    made = split_trace(trace, block, ((UP, 2),))
    entered = [(code, subject) for code, subject, *_ in events(made.forward) if code in (ENTER, EXIT)]
    at = entered.index((ENTER, UP))
    assert subjects[0] == UP
    assert entered[at : at + 4] == [(ENTER, UP), (EXIT, UP), (ENTER, subjects[1]), (EXIT, subjects[1])]
    hooks = [e[:2] for e in events(made.backward) if e[0] in (PRE_BACKWARD, POST_BACKWARD) and e[1] in subjects]
    assert hooks == [(code, s) for s in reversed(subjects) for code in (PRE_BACKWARD, POST_BACKWARD)]
    allocated = {e[2]: e[3] for e in events(made.backward) if e[0] == ALLOC}
    weights = [e for e in events(made.backward) if e[0] == GRADIENT and cut.operator_of.get(e[1]) in subjects]
    assert sorted(allocated[e[2]] for e in weights) == [2048, 131072, 131072]  # the bias, and halves of 512 x 128 x 4
    assert made.outputs == trace.outputs


def with_scratch(row, number):
    """The events with a scratch of its own behind every allocation."""
    found = []
    for event in events(row):
        found.append(event)
        if event[0] == ALLOC:
            number += 1
            found.append((WORKSPACE, number, 0, 0, 0))
    return tuple(n for event in found for n in event)


def test_every_slice_holds_while_it_runs_what_the_whole_operator_holds(profile):
    block, trace = profile.classes[1], profile.trace(1, "none")
    trace = dataclasses.replace(
        trace, forward=with_scratch(trace.forward, 0), backward=with_scratch(trace.backward, 1000)
    )
    cut = split_class(block, ((UP, 3),))
    subjects = [cut.subjects[f"mlp.up#{i}/3"] for i in range(3)]
    made = split_trace(trace, block, ((UP, 3),))

    def between(row, begin, end):
        found = {}
        for code, subject, *_ in events(row):
            if code == begin and subject in subjects:
                inside = found.setdefault(subject, [])
            elif code == end and subject in subjects:
                inside = []
            elif code == WORKSPACE and found:
                inside.append(subject)
        return [found[subject] for subject in subjects]

    first, *others = between(made.forward, ENTER, EXIT)
    assert len(first) == 1, "of the product"
    assert others == [first, first]
    first, *others = between(made.backward, PRE_BACKWARD, POST_BACKWARD)
    assert len(others[0]) == 2, "of the products for the input's and the weight's gradient"
    assert others[0] == others[1] == first[:2]


def test_slices_are_gathered_one_by_one_so_a_leaner_peak_takes_more_collectives(profile):
    block = profile.classes[1]
    whole = [
        SectionPlan(name=s.name, is_block=s.class_index == 1, recompute="none", units=()) for s in profile.sections
    ]
    predictions = []
    for num_slices in (1, 8):
        names = [slice_name(name, i, num_slices) for name in ("mlp.up", "mlp.down") for i in range(num_slices)]
        sections = []
        for section, described in zip(whole, profile.sections, strict=True):
            own = profile.classes[described.class_index]
            cut = with_slices(own, names) if own is block and num_slices > 1 else own
            choices = {operator.name: ZERO3 for operator in cut.operators}
            sections.append(dataclasses.replace(section, units=group_units(cut, choices)))
        predictions.append(predict_sections(profile, tuple(sections), micro_batch=1, accumulation=1))
    assert predictions[1].peak_bytes < predictions[0].peak_bytes - block.operator_bytes(UP)
    assert predictions[1].step_s > predictions[0].step_s
    assert predictions[1].persistent_bytes == pytest.approx(predictions[0].persistent_bytes, rel=0.01)


def test_menus_split_what_is_large_and_can_be(profile):
    assert splittable(profile, 1) == (1, 2, UP, DOWN)
    assert large_operators(profile, 1) == (UP, DOWN)
    stem, block, head = profile.classes
    plain = dataclasses.replace(stem, operators=tuple(dataclasses.replace(o, can_split=False) for o in stem.operators))
    assert splittable(dataclasses.replace(profile, classes=(plain, block, head)), 0) == ()
    found = split_assignments(profile.classes[1], (DP, ZERO2, ZERO3), (UP, DOWN))
    splits = {splits_of(profile.classes[1], units) for units in found}
    assert {((UP, k),) for k in (2, 4, 8)} | {((UP, k), (DOWN, k)) for k in (2, 4, 8)} <= splits
    for units in found:
        assert "#" not in units[0].operators[0], "a block's door is a unit of whole operators"
        assert all(len(unit.operators) == 1 for unit in units if "#" in unit.operators[0])


def test_an_operator_that_runs_twice_or_shares_its_weight_is_left_whole(profile):
    trace = profile.trace(1, "none")
    doubled = dataclasses.replace(trace, forward=(*trace.forward, ENTER, UP, 0, 0, 0, EXIT, UP, 0, 0, 0))
    traces = tuple(doubled if t is trace else t for t in profile.traces)
    assert UP not in splittable(dataclasses.replace(profile, traces=traces), 1)
    operators = list(profile.classes[1].operators)
    operators[DOWN] = dataclasses.replace(operators[DOWN], modules=("mlp.down", "other"))
    shared = dataclasses.replace(profile.classes[1], operators=tuple(operators))
    classes = (profile.classes[0], shared, profile.classes[2])
    assert DOWN not in splittable(dataclasses.replace(profile, classes=classes), 1)
