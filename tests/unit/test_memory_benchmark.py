"""What can be wrong in the benchmarks of memory: the cases, the other methods' formulas, the statistics."""

import dataclasses
import json
import sys
import types

import gpu_memory
import memory
import memory_peers
import pytest
from memory import Outcome, Row

from osdp_ray.costs import simulate_bytes
from osdp_ray.profiling.trace import Trace
from osdp_ray.records.plan import Choice, SectionPlan, Unit
from osdp_ray.records.profile import Operator, Parameter, Section, SectionClass
from osdp_ray.workloads.gpt import GptWorkload
from tests.memory_cases import (
    HYBRID_CHOICES,
    MODELS,
    WORLDS,
    available_models,
    build_case,
    draw_cases,
    memory_cases,
    subjects_of,
)
from tests.models import OWN
from tests.oracle import UNIFORM_CHOICES, make_plan, measure, traced_profile

CHOICES = {**UNIFORM_CHOICES, **HYBRID_CHOICES}
NAMES = ("large", "small", "frozen")


def profile_of_three(precision="fp32", ranks_per_node=(4,)):
    """One section with operators of 3000, 1000 and 100 parameters, the last one frozen."""
    shapes = {"large": (100, 30), "small": (50, 20), "frozen": (10, 10)}
    parameters = tuple(
        Parameter(name=f"{name}.weight", shape=shape, itemsize_bytes=4, requires_grad=name != "frozen")
        for name, shape in shapes.items()
    )
    operators = tuple(
        Operator(name=name, kind="Linear", modules=(name,), parameters=(index,), buffer_bytes=0)
        for index, name in enumerate(shapes)
    )
    section_class = SectionClass(name="stem", is_block=False, operators=operators, parameters=parameters)
    return profile_of((section_class,), (Section(name="stem", class_index=0),), precision, ranks_per_node)


def profile_of(classes, sections, precision, ranks_per_node):
    """A profile without traces."""
    workload = types.SimpleNamespace(name="three", precision=precision)
    structure = types.SimpleNamespace(classes=classes, sections=sections)
    traced = Trace(structure=structure, traces=(), evaluation=(), batch_bytes_per_sample=0, buffer_bytes=0)
    return traced_profile(workload, traced, ranks_per_node=ranks_per_node)


def plan_of_three(profile, **choice_of):
    """A plan in which each operator is a unit of its own with the named choice."""
    units = tuple(Unit(operators=(name,), modules=(name,), choice=CHOICES[choice_of[name]]) for name in NAMES)
    section = SectionPlan(name="stem", is_block=False, recompute="none", units=units)
    return make_plan(profile, (section,), micro_batch=2, accumulation=1)


def all_alike(profile, choice):
    return plan_of_three(profile, **dict.fromkeys(NAMES, choice))


def plan_of_layers(recomputes, precision="bf16"):
    """A plan of blocks that recompute like this, and a stem, at micro-batch 2."""
    unit = Unit(operators=("a",), modules=("a",), choice=Choice(shard_over="world", regather=True))
    stem = SectionPlan(name="stem", is_block=False, recompute="none", units=())
    blocks = tuple(
        SectionPlan(name=f"h.{index}", is_block=True, recompute=recompute, units=(unit,))
        for index, recompute in enumerate(recomputes)
    )
    profile = profile_of((), (), precision, (4,))
    return make_plan(profile, (stem, *blocks), micro_batch=2, accumulation=1)


@pytest.mark.parametrize(
    ("precision", "ranks_per_node", "choice", "expected"),
    [
        ("fp32", (4,), "ZeRO-3", 16 * 4000 // 4 + 4 * 100 // 4 + 2 * 4 * 3000),
        ("fp32", (4,), "ZeRO-2", 16 * 4000 // 4 + 4 * 100 // 4 + 4 * 4100),
        ("fp32", (4,), "DP", 16 * 4000 + 4 * 100),
        ("fp32", (2, 2), "HSDP", 16 * 4000 // 2 + 4 * 100 // 2 + 2 * 4 * 3000),
        ("bf16", (4,), "ZeRO-3", 18 * 4000 // 4 + 4 * 100 // 4 + 2 * 2 * 3000),
        ("bf16", (4,), "ZeRO-2", 18 * 4000 // 4 + 4 * 100 // 4 + 2 * 4100),
        ("bf16", (4,), "DP", 18 * 4000 + 4 * 100 + 2 * 4100),
    ],
)
def test_deepspeeds_states_are_those_worked_by_hand(precision, ranks_per_node, choice, expected):
    profile = profile_of_three(precision, ranks_per_node)
    assert memory_peers.deepspeed_bytes(profile, all_alike(profile, choice)) == expected


def test_deepspeeds_states_follow_every_operators_own_choice():
    profile = profile_of_three()
    plan = plan_of_three(profile, large="DP", small="ZeRO-3", frozen="ZeRO-3")
    expected = 16 * 3000 + 16 * 1000 // 4 + 4 * 100 // 4 + 2 * 4 * 1000
    assert memory_peers.deepspeed_bytes(profile, plan) == expected


def test_the_rule_of_thumb_is_four_times_what_a_rank_holds_of_the_weights():
    profile = profile_of_three()
    assert memory_peers.weights_times_four_bytes(profile, all_alike(profile, "ZeRO-3")) == 4 * 4 * 4100 // 4
    assert memory_peers.weights_times_four_bytes(profile, all_alike(profile, "DP")) == 4 * 4 * 4100


def test_megatrons_activations_are_the_published_ones_in_16_bits():
    sizes = memory_peers.TransformerSizes(hidden=64, heads=2, sequence=32, vocabulary=256)
    plan = plan_of_layers(("full", "none", "none", "none"))
    sbh, a_s_over_h, v_over_h = 32 * 2 * 64, 2 * 32 / 64, 256 / 64
    outside = sbh + 4 * sbh * (1 + v_over_h)

    kept = memory_peers.megatron_activation_bytes(sizes, plan, keeps_attention=True)
    fused = memory_peers.megatron_activation_bytes(sizes, plan, keeps_attention=False)

    assert kept == 2 * sbh + 3 * sbh * (34 + 5 * a_s_over_h) + outside
    assert fused == 2 * sbh + 3 * sbh * 34 + outside


def test_megatrons_activations_double_their_numbers_but_not_their_masks_in_fp32():
    sizes = memory_peers.TransformerSizes(hidden=64, heads=2, sequence=32, vocabulary=256)
    sbh = 32 * 2 * 64
    plan = plan_of_layers(("full", "none"), precision="fp32")
    kept = memory_peers.megatron_activation_bytes(sizes, plan, keeps_attention=True)
    assert kept == 4 * sbh + sbh * (16 * 4 + 2 + 9) + sbh + 8 * sbh + 4 * 32 * 2 * 256


def test_megatrons_formula_says_nothing_of_blocks_that_recompute_cheap_operations():
    sizes = memory_peers.TransformerSizes(hidden=64, heads=2, sequence=32, vocabulary=256)
    plan = plan_of_layers(("none", "selective"))
    assert memory_peers.megatron_activation_bytes(sizes, plan, keeps_attention=True) is None


def test_megatrons_formula_applies_to_decoders_of_its_own_build_alone():
    sizes = memory_peers.TransformerSizes(hidden=64, heads=4, sequence=32, vocabulary=300)
    gpt = GptWorkload(hidden=64, heads=4, sequence=32, vocabulary=300)
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "vocab_size": 300}
    opt = {"model_type": "opt", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    assert memory_peers.transformer_sizes(gpt) == sizes
    assert memory_peers.transformer_sizes(types.SimpleNamespace(config=gpt2, sequence=32)) == sizes
    assert memory_peers.transformer_sizes(types.SimpleNamespace(config=opt, sequence=32)) == sizes
    assert memory_peers.transformer_sizes(types.SimpleNamespace(config={**opt, "model_type": "llama"})) is None
    assert memory_peers.transformer_sizes(OWN["plain-stack"]()) is None


def test_errors_are_fractions_of_the_truth_and_under_is_the_truth_above_the_prediction():
    pairs = [(100, 100), (130, 100), (196, 200), (100, 100), (101, 100)]
    assert memory.error_figures(pairs) == {
        "num_cases": 5,
        "error_median_fraction": pytest.approx(0.01),
        "error_p95_fraction": pytest.approx(0.3),
        "error_max_fraction": pytest.approx(0.3),
        "error_under_max_fraction": pytest.approx(0.02),
    }


def test_the_95th_percentile_is_the_nearest_rank_and_nothing_is_under_where_all_is_over():
    figures = memory.error_figures([(1000 + index, 1000) for index in range(1, 101)])
    assert figures["error_p95_fraction"] == pytest.approx(0.095)
    assert figures["error_under_max_fraction"] == 0.0


def test_figures_of_no_cases_are_empty():
    figures = memory.error_figures([])
    assert figures.pop("num_cases") == 0
    assert set(figures.values()) == {None}


def row(draw, truth_bytes, **predicted):
    outcomes = {name: Outcome(predicted_bytes=None, seconds=0.0) for name in memory.METHODS}
    outcomes |= {name: Outcome(predicted_bytes=num_bytes, seconds=0.5) for name, num_bytes in predicted.items()}
    return Row(draw=draw, truth_bytes=truth_bytes, truth_s=1.0, outcomes=outcomes)


def test_the_figures_have_the_promised_keys_and_tell_plain_cases_from_others():
    draws = draw_cases(40, 0, models=("gpt",))
    plain = [draw for draw in draws if draw.precision == "fp32" and draw.accumulation == 1]
    other = next(draw for draw in draws if draw.precision == "bf16")
    rows = [
        row(plain[0], 100, ours=100),
        row(plain[1], 200, ours=198, megatron_activations=100),
        row(other, 50, ours=99),
    ]

    figures = memory.summarise(rows)

    errors = {"num_cases", "error_median_fraction", "error_max_fraction", "error_under_max_fraction"}
    assert errors | {"num_plain_cases", "plain_error_max_bytes", "peers"} <= set(figures)
    assert all(errors <= set(peer) for peer in figures["peers"].values())
    assert set(figures["peers"]) == set(memory.METHODS) - {"ours"}
    assert (figures["num_cases"], figures["num_plain_cases"], figures["plain_error_max_bytes"]) == (3, 2, 2)
    assert figures["error_max_fraction"] == pytest.approx(0.98)
    assert figures["error_under_max_fraction"] == pytest.approx(0.01)
    assert figures["peers"]["megatron_activations"]["num_cases"] == 1
    assert figures["peers"]["megatron_activations"]["error_max_fraction"] == pytest.approx(0.5)
    assert "198" not in memory.worst_cases(rows)[0]
    assert memory.worst_cases(rows)[1].startswith("-1.000 % (-2 of 200 B)")


def test_a_step_that_torchs_tracker_cannot_follow_is_counted_and_any_other_failure_ends_the_run(monkeypatch):
    def fail(*_):
        raise KeyError("embedding")

    monkeypatch.setattr(memory_peers, "tracked_bytes", fail)
    monkeypatch.setattr(memory_peers, "deepspeed_bytes", fail)
    case = types.SimpleNamespace(workload=None, plan=None, profile=None)
    outcome = memory.ask(memory.torch_tracker, case)
    assert (outcome.predicted_bytes, outcome.problem) == (None, "KeyError")
    failed = dataclasses.replace(row(draw_cases(1, 0)[0], 10, ours=10), outcomes={"torch_fsdp_mem_tracker": outcome})
    assert memory.method_figures([failed], "torch_fsdp_mem_tracker")["num_failed"] == 1
    with pytest.raises(KeyError, match="embedding"):
        memory.ask(memory.deepspeed_states, case)


def test_a_seeds_cases_are_always_the_same_and_more_of_them_begin_alike():
    assert draw_cases(30, 7) == draw_cases(60, 7)[:30]
    assert draw_cases(30, 7) != draw_cases(30, 8)


def test_two_hundred_cases_cover_every_model_world_plan_and_step():
    draws = draw_cases(200, 0, models=tuple(MODELS))
    assert {(d.model, d.precision) for d in draws} == set(subjects_of(tuple(MODELS)))
    assert {d.ranks_per_node for d in draws} == set(WORLDS)
    assert (min(d.num_ranks for d in draws), max(d.num_ranks for d in draws)) == (2, 1024)
    assert {(d.accumulation, d.synchronise) for d in draws} == {
        (1, "every"),
        *((number, synchronise) for number in (2, 3, 4) for synchronise in ("every", "last")),
    }
    assert {d.choice for d in draws} == {None, *CHOICES}
    assert {d.recompute for d in draws if d.choice} == {"none", "selective", "full"}
    assert {d.recompute for d in draws if not d.choice} == {"mixed"}
    assert all(len(d.ranks_per_node) > 1 for d in draws if d.choice in HYBRID_CHOICES)
    assert {d.micro_batch for d in draws} == set(range(1, 7))
    assert sum(d.is_plain for d in draws) >= 30


def test_models_of_hugging_face_are_left_out_where_transformers_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "plain-stack" in available_models()
    assert "gpt" in available_models()
    assert "llama" not in available_models()


def test_a_drawn_case_is_built_as_it_says():
    draws = [d for d in draw_cases(8, 3, models=("no-blocks",)) if d.num_ranks <= 64]
    for draw in draws:
        case = build_case(draw)
        plan = case.plan
        assert (plan.precision, plan.ranks_per_node) == (draw.precision, draw.ranks_per_node)
        assert (plan.micro_batch, plan.accumulation, plan.synchronise) == (
            draw.micro_batch,
            draw.accumulation,
            draw.synchronise,
        )
        if draw.choice:
            assert {unit.choice for section in plan.sections for unit in section.units} == {CHOICES[draw.choice]}
        assert build_case(draw).plan == plan
    assert [case.draw for case in memory_cases(2, 3, models=("no-blocks",))] == list(
        draw_cases(2, 3, models=("no-blocks",))
    )


def test_the_gpu_benchmarks_comparison_agrees_with_the_oracle_on_a_cpu():
    (drawn,) = draw_cases(1, 5, models=("no-blocks",))
    draw = dataclasses.replace(
        drawn, precision="fp32", ranks_per_node=(4,), accumulation=2, synchronise="last", choice="ZeRO-3"
    )
    case = build_case(dataclasses.replace(draw, recompute="none"))
    truth = measure(case.workload, case.plan)
    trial = gpu_memory.Trial(label=draw.label, build=lambda: (case.workload, case.profile, case.plan))

    (comparison,) = gpu_memory.compare_all([trial], "cpu", 60.0)

    assert comparison.predicted_bytes == simulate_bytes(case.profile, case.plan).peak_bytes
    assert comparison.measured.peak_bytes == truth.peak_bytes
    assert comparison.measured.persistent_bytes == truth.persistent_bytes
    assert (comparison.measured.other_bytes, comparison.measured.reserved_bytes) == (0, None)
    figures = gpu_memory.summarise([comparison])
    assert figures["num_cases"] == 1
    assert figures["persistent_error_max_bytes"] == 0
    assert draw.label in gpu_memory.comparison_table([comparison])
    assert "persistent_error_max_bytes" in gpu_memory.figure_table(figures)


def test_the_gpu_benchmark_stops_at_its_time_limit_and_takes_both_precisions_of_a_large_gpt():
    assert gpu_memory.compare_all(gpu_memory.choose_trials(3), "cpu", -1.0) == []
    labels = [trial.label for trial in gpu_memory.choose_trials(3)]
    assert len(labels) == 2 * len(gpu_memory.LARGE_PLANS) + 3
    assert any("bf16" in label for label in labels[:-3])


def test_reserved_bytes_are_told_against_all_that_was_allocated():
    measured = gpu_memory.StepPeak(persistent_bytes=80, other_bytes=20, peak_bytes=180, reserved_bytes=300)
    comparison = gpu_memory.Comparison(
        label="one", predicted_bytes=171, predicted_persistent_bytes=75, measured=measured
    )
    figures = gpu_memory.summarise([comparison])
    assert figures["reserved_over_allocated_max"] == pytest.approx(1.5)
    assert figures["error_under_max_fraction"] == pytest.approx(0.05)
    assert (figures["persistent_error_max_bytes"], figures["other_max_bytes"]) == (5, 20)


def test_the_gpu_benchmark_says_that_there_is_no_gpu_and_ends_well(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_memory.py", "--json", str(tmp_path / "figures.json")])
    gpu_memory.main()
    assert "no GPU" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["has_gpu"], figures["num_cases"]) == (False, 0)
