"""Random plans of what the planner can choose, and the training of one by every rank and by one plain process.

A `Drill` is one case: a model, a plan, an optimizer, clipping. Its data are `GLOBAL_BATCH` samples per step, the same
for every number of ranks; micro-batches are those of the plan, also in the plain process, since some losses are means
over what differs between micro-batches.
"""

import copy
import dataclasses
import functools
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from osdp_ray.costs.splitting import splittable
from osdp_ray.execution.apply import parallelize
from osdp_ray.execution.clipping import clip_grad_norm
from osdp_ray.modeling.materialize import build_on_meta
from osdp_ray.planning.choices import RECOMPUTES, assignments, choices_of, split_assignments
from osdp_ray.profiling.trace import trace
from osdp_ray.records.plan import Plan, SectionPlan
from tests.memory_cases import MODELS, Deck, available_models
from tests.models import HF, LENGTH, VALUES, WIDTH, Built, Stack
from tests.oracle import make_plan, traced_profile

GLOBAL_BATCH, NUM_STEPS, SEED = 8, 5, 3
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
OPTIMIZERS = {
    "for-loop": lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=10 * LEARNING_RATE, momentum=0.9, weight_decay=WEIGHT_DECAY, foreach=True),
}
UNCLIPPED, CLIPPED = 1e9, 0.1
LAST_BIT = 2.0**-24  # of a number in fp32, as a part of it
SKIPPED = ("gpt-dropout", "gpt-deep", "gpt-wide", "gpt")  # every rank drops others; like other GPTs, and slower


class InPlaceLayer(nn.Module):
    """A layer that changes in place what its operators gave, and gives a view."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        inner = self.up(self.norm(x))
        inner += 1
        out = self.down(F.gelu(inner))
        out += x
        return out.view(out.shape)


class InPlace(Stack):
    """What operators and blocks gave is changed in place, views among it."""

    def __init__(self):
        super().__init__([InPlaceLayer() for _ in range(3)])

    def forward(self, tokens):
        x = self.table(tokens)
        x += 1
        for layer in self.layers:
            x = layer(x)
            x *= 1.1
        logits = self.head(x)
        logits += 1
        return logits


class Encoder(nn.Module):
    """torch's own encoder, whose attention uses the weight of a layer that never runs, and parameters of no layer."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(VALUES, WIDTH), nn.Linear(WIDTH, VALUES)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])

    def forward(self, tokens):
        x = self.encoder(self.table(tokens) + self.position)
        return self.head(x * self.scales[0] + self.scales[1])


DRILLED = {**MODELS, "in-place": lambda: Built(InPlace), "encoder": lambda: Built(Encoder)}


@functools.cache
def workload_and_trace(model, precision):
    workload = DRILLED[model]()
    workload.precision = precision
    return workload, trace(workload)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drill:
    """One case."""

    model: str
    plan: Plan
    optimizer: str
    max_norm: float

    @property
    def label(self) -> str:
        plan, chosen = self.plan, sorted({section.label for section in self.plan.sections})
        shape = f"micro-batch {plan.micro_batch} x {plan.accumulation} ({plan.synchronise})"
        return (
            f"{self.model} {plan.precision}, ranks {plan.ranks_per_node}, {shape}, {self.optimizer}, "
            f"clipped at {self.max_norm}, prefetch {plan.prefetch}, {plan.scatter_group} scatter group: "
            f"{'; '.join(chosen)}"
        )

    @property
    def plain(self) -> tuple[object, ...]:
        """What the curve of a plain process depends on."""
        return self.model, self.plan.precision, self.plan.micro_batch, self.optimizer, self.max_norm


def draw_drills(ranks_per_node, num_drills, seed, *, precision="fp32"):
    """Drills for one world; every field is dealt like cards."""
    rng = random.Random(f"drills {ranks_per_node} {seed} {precision}")
    models = [name for name in (*available_models(), "in-place", "encoder") if name not in SKIPPED]
    models += 2 * [name for name in models if name not in HF]  # small ones three times as often
    if precision == "bf16":
        models = [name for name in models if name != "conv-net"]  # BatchNorm on CPU mixes no bf16 with fp32 buffers
    accumulations = [n for n in (1, 2, 1, 2, 4) if GLOBAL_BATCH // sum(ranks_per_node) % n == 0]
    decks = [Deck(rng, values) for values in (models, accumulations, ("every", "last"), (*OPTIMIZERS,), (True, False))]
    options = random.Random(
        f"options of a step {ranks_per_node} {seed} {precision}"
    )  # the other fields stay as they are
    drills = []
    for _ in range(num_drills):
        model, accumulation, synchronise, optimizer, clips = (deck.deal() for deck in decks)
        workload, traced = workload_and_trace(model, precision)
        profile = traced_profile(workload, traced, ranks_per_node=ranks_per_node)
        plan = make_plan(
            profile,
            random_choices(profile, rng),
            micro_batch=GLOBAL_BATCH // profile.num_ranks // accumulation,
            accumulation=accumulation,
            synchronise=synchronise if accumulation > 1 else "every",
            prefetch=options.choice((0, 0, 1, 2, 3)),
            scatter_group=options.choice(("shared", "shared", "own")),
        )
        drills.append(Drill(model=model, plan=plan, optimizer=optimizer, max_norm=CLIPPED if clips else UNCLIPPED))
    return drills


def random_choices(profile, rng):
    """What the planner can choose for a section, drawn anew for each: units of its operators, and recomputation."""
    choices = choices_of(profile)
    menus = {index: assignments(section_class, choices) for index, section_class in enumerate(profile.classes)}
    for index in menus:
        menus[index] = [
            *rng.sample(menus[index], min(4, len(menus[index]))),
            *split_at_random(profile, index, choices, rng),
        ]
    return tuple(
        SectionPlan(
            name=section.name,
            is_block=profile.classes[section.class_index].is_block,
            recompute=rng.choice(RECOMPUTES) if profile.classes[section.class_index].is_block else "none",
            units=rng.choice(menus[section.class_index]),
        )
        for section in profile.sections
    )


def split_at_random(profile, class_index, choices, rng):
    """Some units with one or two operators as slices; none where none splits.

    The planner splits only what is large, which no operator of these models is.
    """
    section_class = profile.classes[class_index]
    found = splittable(profile, class_index)
    if not found or (section_class.is_block and len(section_class.operators) < 2):
        return []
    units = split_assignments(section_class, choices, tuple(sorted(rng.sample(found, min(2, len(found))))))
    return rng.sample(units, min(4, len(units)))


@functools.cache
def samples(model):
    """The batch of every step."""
    workload = DRILLED[model]()
    batches = workload.build_batches(0, 1, GLOBAL_BATCH, SEED, 0)
    return workload, [next(batches) for _ in range(NUM_STEPS)]


def _without_dropout(model):
    """Ranks draw other random numbers than one process does: nothing is dropped here."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "dropout_prob", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _cut(batch, first, size):
    return tree_map(lambda leaf: leaf[first : first + size] if isinstance(leaf, torch.Tensor) else leaf, batch)


def curve_of_rank(drill, rank, num_ranks):
    """(mean loss over the global batch, gradient norm) of every step under the plan."""
    workload, batches = samples(drill.model)
    plan = drill.plan
    model, initialisation = build_on_meta(workload)
    _without_dropout(model)
    parallelize(model, plan, device_type="cpu")
    initialisation.materialize(model, "cpu", SEED)
    optimizer = OPTIMIZERS[drill.optimizer]([p for p in model.parameters() if p.requires_grad])
    curve = []
    for batch in batches:
        total = torch.zeros((), dtype=torch.float64)
        for number in range(plan.accumulation):
            if plan.synchronise == "last":
                model.set_requires_gradient_sync(number + 1 == plan.accumulation)
            first = (number * num_ranks + rank) * plan.micro_batch
            loss = workload.loss(model, _cut(batch, first, plan.micro_batch))
            (loss / plan.accumulation).backward()
            total += loss.detach() / plan.accumulation
        norm = clip_grad_norm(model.parameters(), drill.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        curve.append((total.item() / num_ranks, norm.item()))
    return curve


def plain_curve(drill, noise=None):
    """The same of one process, by torch alone; its micro-batches are the plan's, one after another.

    With `noise`, the seed of a generator, every gradient's last bit is off: what no sum in another order can beat.
    """
    generator = torch.Generator().manual_seed(noise) if noise is not None else None
    workload, batches = samples(drill.model)
    model, initialisation = build_on_meta(workload)
    initialisation.materialize(_without_dropout(model), "cpu", SEED)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[drill.optimizer](trained)
    size, num_micro_batches = drill.plan.micro_batch, GLOBAL_BATCH // drill.plan.micro_batch
    curve = []
    for batch in batches:
        total = 0.0
        for number in range(num_micro_batches):
            part = _cut(batch, number * size, size)
            if drill.plan.precision == "bf16":
                loss = _backward_in_bf16(workload, model, part, num_micro_batches)
            else:
                loss = workload.loss(model, part)
                (loss / num_micro_batches).backward()
            total += loss.item() / num_micro_batches
        for parameter in trained if generator is not None else ():
            if parameter.grad is not None:
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.grad *= 1 + LAST_BIT * signs
        norm = torch.nn.utils.clip_grad_norm_(trained, drill.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append((total, norm.item()))
    return curve


def _backward_in_bf16(workload, model: nn.Module, batch, num_micro_batches):
    """Computes with a bf16 copy of the parameters and adds its gradients, in fp32, to the model's."""

    def cast(values):
        return tree_map(lambda v: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v, values)

    computing = copy.deepcopy(model)
    for parameter in computing.parameters():
        parameter.data = parameter.data.bfloat16()
    for module in computing.modules():  # as FSDP2 does for a unit: buffers in fp32 may have made inputs fp32
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda _, args: cast(args))
    loss = workload.loss(computing, cast(batch))
    (loss / num_micro_batches).backward()
    for kept, used in zip(model.parameters(), computing.parameters(), strict=True):
        if used.grad is not None:
            kept.grad = used.grad.float() if kept.grad is None else kept.grad + used.grad.float()
    return loss.detach()
