"""The built-in workload `gpt`: a byte-level decoder that learns to write the text of a corpus.

It is an ordinary model: no line of it knows of sharding, so that it is trained like any other one.
"""

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from osdp_ray.errors import UsageError
from osdp_ray.workload import Workload
from osdp_ray.workloads import text

NUM_BYTE_VALUES = 256
_INITIAL_STD = 0.02
_LAST_RATE_FRACTION = 0.1


class Attention(nn.Module):
    """Causal self-attention of `heads` heads: [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.heads, hidden // self.heads).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)  # each [B, heads, T, hidden / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """One repeating layer, normalised before attention and before the MLP: [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.norm_2 = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """A decoder of `layers` blocks with learned positions: token numbers [B, T] -> logits [B, T, vocabulary]; T is at
    most `sequence`.

    Initialised like GPT-2 (normal, 0.02; the layers that end a residual branch divided by sqrt(2 * layers)), by
    in-place operations only, so that it can be built on the meta device. `tied` shares the embedding with the head.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        sequence: int,
        vocabulary: int = NUM_BYTE_VALUES,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight
        self.initialise()

    def initialise(self) -> None:
        """Gives every parameter its first value."""
        branch_std = _INITIAL_STD / math.sqrt(2 * max(len(self.blocks), 1))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attention.projection", "mlp.down"))
                nn.init.normal_(module.weight, std=branch_std if ends_branch else _INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.token_embedding(inputs) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GptWorkload(Workload):
    """A GPT on the bytes of a corpus. `data` is a path, or '' for the source of Python's standard library.

    Raises UsageError for sizes that make no model; the corpus is opened when its batches are asked for.
    """

    name = "gpt"

    def __init__(
        self,
        *,
        layers: int = 4,
        hidden: int = 128,
        heads: int = 4,
        sequence: int = 128,
        vocabulary: int = NUM_BYTE_VALUES,
        data: str = "",
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
        weight_decay: float = 0.1,
        dropout: float = 0.0,
        tied: bool = False,
        held_out_windows: int = 48,
    ) -> None:
        self.layers, self.hidden, self.heads, self.sequence = layers, hidden, heads, sequence
        self.vocabulary, self.dropout, self.tied = vocabulary, dropout, tied
        self.data = os.path.abspath(os.path.expanduser(data)) if data else ""  # workers run in a folder of their own
        self.learning_rate, self.warmup_steps, self.weight_decay = learning_rate, warmup_steps, weight_decay
        self.held_out_windows = held_out_windows
        self._check()

    def _check(self) -> None:
        flags = {"layers": "--layers", "hidden": "--hidden", "heads": "--heads", "sequence": "--seq"}
        for name, flag in flags.items():
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, and a GPT needs at least 1. Raise {flag}.")
        if self.hidden % self.heads:
            below = next(heads for heads in range(min(self.heads, self.hidden), 0, -1) if self.hidden % heads == 0)
            above = (self.hidden // self.heads + 1) * self.heads
            raise UsageError(
                f"{self.heads} heads do not divide a hidden size of {self.hidden}. "
                f"Choose --heads that divides it, such as {below}, or --hidden {above}."
            )
        if self.vocabulary < NUM_BYTE_VALUES:
            raise UsageError(
                f"vocabulary is {self.vocabulary}, and bytes take {NUM_BYTE_VALUES} values. Raise vocabulary."
            )
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise UsageError(f"a learning rate of {self.learning_rate} cannot train. Give --lr above 0, such as 1e-3.")
        for name in ("warmup_steps", "weight_decay", "held_out_windows"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, below 0. Give {name}=0 or more.")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is {self.dropout}, no fraction below 1. Give dropout=0 up to 0.9.")

    def settings(self) -> dict[str, Any]:
        """All settings, and the bytes on disk of the data. Raises DataError where the data is missing."""
        return {**vars(self), "data_bytes": text.data_bytes(self.data)}

    def build_model(self) -> GPT:
        return GPT(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            sequence=self.sequence,
            vocabulary=self.vocabulary,
            dropout=self.dropout,
            tied=self.tied,
        )

    @property
    def blocks(self) -> tuple[str, ...]:
        return ("blocks",)

    def open_corpus(self) -> text.Corpus:
        """The corpus in windows of this sequence, read once per process. Raises DataError with the remedy."""
        return text.open_corpus(self.data, self.sequence)

    def unigram_entropy_nats(self) -> float:
        """Nats per byte of the held-out text for a model without context: what a trained one must get well under."""
        return text.unigram_entropy_nats(self.open_corpus().held_out_text)

    def build_batches(
        self, rank: int, num_ranks: int, micro_batch: int, seed: int, start_step: int
    ) -> Iterator[text.Batch]:
        return self.open_corpus().train_batches(rank, num_ranks, micro_batch, seed, start_step)

    def build_eval_batches(self, rank: int, num_ranks: int, micro_batch: int) -> list[text.Batch] | None:
        """One rank's share of the held-out windows, as `Corpus.held_out_batches` divides them."""
        if self.held_out_windows == 0:
            return None
        return self.open_corpus().held_out_batches(rank, num_ranks, micro_batch, self.held_out_windows)

    def loss(self, model: nn.Module, batch: text.Batch) -> torch.Tensor:
        """Mean cross entropy in nats per byte."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW in its fused form, which holds no temporaries while it steps, on CPU and on GPU."""
        return torch.optim.AdamW(
            parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=self.weight_decay, fused=True
        )

    def build_scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
        """A linear warm-up (of at most half the steps), then a cosine down to a tenth of the learning rate."""
        warmup_steps = min(self.warmup_steps, num_steps // 2)

        def rate_fraction(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            done_fraction = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
            cosine = (1 + math.cos(math.pi * done_fraction)) / 2
            return _LAST_RATE_FRACTION + (1 - _LAST_RATE_FRACTION) * cosine

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate_fraction)


def gpt(
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    sequence: int = 128,
    data: str = "",
    learning_rate: float = 1e-3,
    warmup_steps: int = 10,
    weight_decay: float = 0.1,
    dropout: float = 0.0,
    tied: bool = False,
    held_out_windows: int = 48,
) -> GptWorkload:
    """The workload that `osdp ... gpt key=value` names. Raises UsageError or DataError before anything is started."""
    workload = GptWorkload(
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=sequence,
        data=data,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        dropout=dropout,
        tied=tied,
        held_out_windows=held_out_windows,
    )
    workload.open_corpus()
    return workload
