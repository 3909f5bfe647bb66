"""Other ways to tell a step's peak, for the same plans: published formulas, a rule of thumb, torch's own tracker.

Formulas are adapted as little as a fair comparison needs, each in the plan's favour: they learn how every operator is
held, and the precision that is trained in (most are published for 16-bit training). None knows of accumulation.

c is 4 bytes in fp32 and 2 in bf16, n the number of ranks that share an operator, P its parameters.
"""

import dataclasses
import gc

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # torch 2.13: private

from osdp_ray.costs import splits_of, table_of
from osdp_ray.costs.units import group_size
from osdp_ray.records.plan import Plan, SectionPlan
from osdp_ray.records.profile import Operator, Parameter, Precision, Profile, SectionClass
from osdp_ray.workload import Workload
from osdp_ray.workloads.gpt import GptWorkload
from tests.fake_rank import fake_rank

_COMPUTE_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}
# What DeepSpeed's estimators divide by the ranks: fp32 weights, gradients and two moments, and 16-bit gradients.
_STATE_BYTES: dict[Precision, int] = {"fp32": 4 + 4 + 8, "bf16": 4 + 4 + 8 + 2}
_FROZEN_BYTES = 4
# What FSDPMemTracker was seen to raise: several micro-batches, parameters that two modules share.
TRACKER_FAILURES = (NotImplementedError, AssertionError, KeyError)


def weights_times_four_bytes(profile: Profile, plan: Plan) -> int:
    """The rule of thumb for Adam (weights, gradients, two moments), over what this rank holds of the weights."""
    total = 0.0
    for parameters, num_shards, _ in _held(profile, plan):
        total += 4 * sum(parameter.num_bytes for parameter in parameters) / num_shards
    return round(total)


def deepspeed_bytes(profile: Profile, plan: Plan) -> int:
    """States only, as DeepSpeed's estimators give them without offload.

    `estimate_zero2_model_states_mem_needs`: 2 P + 18 P / n, where 2 are 16-bit weights and 18 = 2 + 4 + 4 + 8 are
    16-bit gradients, fp32 gradients, fp32 weights and Adam's moments; `estimate_zero3_model_states_mem_needs`:
    18 P / n + 4 x the largest layer (its 16-bit weights and gradients), in deepspeed/runtime/zero of release 0.18.

    Here, per operator: ZeRO-2, sharded and kept, c P + s P / n; ZeRO-3, sharded and gathered again, s P / n, and the
    largest such operator 2 c P; replicated, c P + s P in bf16 (the same formula with n = 1) and s P in fp32, which
    needs no second copy of the weights. s is 18 in bf16 and 16 in fp32, where there are no 16-bit gradients. Frozen
    parameters, which the formula does not know, count as fp32 weights alone.
    """
    compute_bytes, state_bytes = _COMPUTE_BYTES[profile.precision], _STATE_BYTES[profile.precision]
    total, largest = 0.0, 0
    for parameters, num_shards, regather in _held(profile, plan):
        numel = sum(parameter.numel for parameter in parameters)
        total += sum(
            parameter.numel * (state_bytes if parameter.requires_grad else _FROZEN_BYTES) / num_shards
            for parameter in parameters
        )
        if num_shards > 1 and regather:
            largest = max(largest, 2 * compute_bytes * numel)
        elif num_shards > 1 or profile.precision == "bf16":
            total += compute_bytes * numel
    return round(total) + largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """The sizes that Megatron's formula asks for: h, a, s, v."""

    hidden: int
    heads: int
    sequence: int
    vocabulary: int


def transformer_sizes(workload: Workload) -> TransformerSizes | None:
    """Sizes of a decoder as the formula has it (attention, an MLP four times as wide); None for other models."""
    if isinstance(workload, GptWorkload):
        return TransformerSizes(
            hidden=workload.hidden,
            heads=workload.heads,
            sequence=workload.sequence,
            vocabulary=workload.vocabulary,
        )
    config = getattr(workload, "config", {})
    names = {"gpt2": ("n_embd", "n_head"), "opt": ("hidden_size", "num_attention_heads")}.get(config.get("model_type"))
    if names is None:
        return None
    return TransformerSizes(
        hidden=config[names[0]],
        heads=config[names[1]],
        sequence=workload.sequence,  # type: ignore[attr-defined]
        vocabulary=config["vocab_size"],
    )


def megatron_activation_bytes(sizes: TransformerSizes, plan: Plan, *, keeps_attention: bool) -> int | None:
    """Activations by Korthikanti et al., arXiv 2205.05198: s b h (34 + 5 a s / h) per layer, 2 s b h where the layer is
    recomputed, and s b h + 4 s b h (1 + v / h) outside of the layers.

    34 is 16 numbers of 2 bytes and 2 bytes of dropout masks, 5 is 2 numbers and 1 byte of mask; with numbers of c bytes
    the layer is s b h (16 c + 2 + (2 c + 1) a s / h). Without `keeps_attention` the term in a is left out, as the
    paper does where attention is recomputed, which is what fused attention does. None where a block recomputes
    selectively: the paper means attention by it, and the plan cheap operations.
    """
    if any(section.recompute == "selective" for section in plan.sections):
        return None
    c = _COMPUTE_BYTES[plan.precision]
    s, b, h = sizes.sequence, plan.micro_batch, sizes.hidden
    attention = (2 * c + 1) * sizes.heads * s * s * b if keeps_attention else 0
    layers = sum(_layer_bytes(section, c, s * b * h, attention) for section in plan.sections if section.is_block)
    return layers + s * b * h + 2 * c * s * b * h + 4 * s * b * sizes.vocabulary


def _layer_bytes(section: SectionPlan, c: int, sbh: int, attention_bytes: int) -> int:
    return c * sbh if section.recompute == "full" else (16 * c + 2) * sbh + attention_bytes


def tracked_bytes(workload: Workload, plan: Plan) -> int:
    """The peak of the second step by torch's FSDPMemTracker, which watches a real step of this rank.

    Raises one of TRACKER_FAILURES where it cannot follow the step.
    """
    with fake_rank(workload, plan) as rank:
        rank.step()
        gc.collect()
        tracker = FSDPMemTracker(rank.model, rank.optimizer)
        with tracker:
            rank.step()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def _held(profile: Profile, plan: Plan) -> list[tuple[list[Parameter], int, bool]]:
    """Per operator of the model: its parameters, how many ranks share them, whether they are gathered again."""
    held = []
    for section, planned in zip(profile.sections, plan.sections, strict=True):
        splits = splits_of(profile.classes[section.class_index], planned.units)
        section_class = table_of(profile).split_class(section.class_index, splits).section_class
        operator_of = {operator.name: operator for operator in section_class.operators}
        for unit in planned.units:
            num_shards = group_size(unit.choice.shard_over, plan.ranks_per_node)
            for name in unit.operators:
                held.append((_parameters(section_class, operator_of[name]), num_shards, unit.choice.regather))
    return held


def _parameters(section_class: SectionClass, operator: Operator) -> list[Parameter]:
    return [section_class.parameters[index] for index in operator.parameters]
