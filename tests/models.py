"""Small models of many kinds, each as a workload: what transformers builds from a configuration, and odd ones.

`ZOO` maps a name to a function that makes the workload; nothing is downloaded. Names in `HF` need transformers.
"""

import torch
import torch.nn.functional as F
from torch import nn

from osdp_ray.workload import Workload
from osdp_ray.workloads.hf import hf

WIDTH, LENGTH, VALUES = 32, 16, 50


class Built(Workload):
    """A workload that is a function of no arguments and its loss: tokens in, or `[batch, *shape]` floats."""

    def __init__(self, build, *, shape=None):
        self.build, self.shape = build, shape
        self.name = build.__name__

    def settings(self):
        return {"name": self.name}

    def build_model(self):
        return self.build()

    def build_batches(self, rank, num_ranks, micro_batch, seed, start_step):
        generator = torch.Generator().manual_seed(seed + rank)
        while True:
            if self.shape is None:
                yield torch.randint(VALUES, (micro_batch, LENGTH), generator=generator)
            else:
                yield torch.randn(micro_batch, *self.shape, generator=generator)

    def loss(self, model, batch):
        output = model(batch)
        output = output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        return F.cross_entropy(output.flatten(0, -2), torch.zeros_like(output[..., 0], dtype=torch.int64).flatten())

    def build_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class Layer(nn.Module):
    """A residual layer: norm, two linear ones."""

    def __init__(self, inner=64):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """An embedding, layers of the kinds given in turn, a head."""

    def __init__(self, layers):
        super().__init__()
        self.table = nn.Embedding(VALUES, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SharedLayers(Stack):
    """Every layer runs twice, as weights are shared in ALBERT."""

    def forward(self, tokens):
        x = self.table(tokens)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class OneSharedLayer(nn.Module):
    """One layer that runs four times: no repeating blocks."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(VALUES, WIDTH), Layer(), nn.Linear(WIDTH, VALUES)

    def forward(self, tokens):
        x = self.table(tokens)
        for _ in range(4):
            x = self.layer(x)
        return self.head(x)


class Exchange(nn.Module):
    """A layer of two streams and a mask, which gives a tuple and takes keyword arguments."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, y, *, mask):
        return x + self.left(y) * mask, y + self.scale * torch.tanh(self.right(x))


class TwoStreams(nn.Module):
    """Blocks with several inputs; the model gives a dict."""

    def __init__(self):
        super().__init__()
        self.table, self.other = nn.Embedding(VALUES, WIDTH), nn.Embedding(VALUES, WIDTH)
        self.layers = nn.ModuleList(Exchange() for _ in range(4))
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, tokens):
        x, y = self.table(tokens), self.other(tokens)
        mask = (tokens > 3).unsqueeze(-1).float()
        for layer in self.layers:
            x, y = layer(x, y, mask=mask)
        return {"logits": self.head(x + y), "hidden": (x, y)}


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Convolutions, BatchNorm's buffers, pooling: images [B, 3, 16, 16] -> logits [B, 1, VALUES]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.blocks = nn.Sequential(*(ConvBlock(16) for _ in range(4)))
        self.head = nn.Linear(16, VALUES)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 2)
        return self.head(self.blocks(x).mean(dim=(2, 3))).unsqueeze(1)


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it (LoRA)."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


class AdaptedHf(Workload):
    """Another workload with its model frozen and its attention's query and value projections adapted."""

    def __init__(self, inner):
        self.inner, self.name = inner, f"{inner.name}-lora"

    def build_model(self):
        model = self.inner.build_model().requires_grad_(False)
        for module in list(model.modules()):
            for name in ("q_proj", "v_proj"):
                if isinstance(getattr(module, name, None), nn.Linear):
                    setattr(module, name, Adapted(getattr(module, name)))
        return model

    def build_batches(self, *args):
        return self.inner.build_batches(*args)

    def loss(self, model, batch):
        return self.inner.loss(model, batch)

    def build_optimizer(self, parameters):
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, fused=True)


class FirstFrozen(Built):
    """The embedding and the first two layers are frozen: their inputs and outputs need no gradient."""

    def __init__(self):
        super().__init__(frozen_first_layers)

    def build_optimizer(self, parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3, fused=True)


def frozen_first_layers():
    model = Stack([Layer() for _ in range(5)])
    model.table.requires_grad_(False)
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    return model


def alternating():
    return Stack([Layer(64 if index % 2 else 96) for index in range(8)])


def plain_stack():
    return Stack([Layer() for _ in range(5)])


def no_blocks():
    return nn.Sequential(nn.Embedding(VALUES, WIDTH), nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, VALUES))


def shared_layers():
    return SharedLayers([Layer() for _ in range(3)])


_SIZES = {"hidden": 64, "heads": 4, "vocabulary": 300, "sequence": 32}
HF = {
    "gpt2": lambda: hf(model="gpt2", layers=4, **_SIZES),
    "opt": lambda: hf(model="opt", layers=4, **_SIZES),
    "llama": lambda: hf(model="llama", layers=4, overrides='{"num_key_value_heads": 2}', **_SIZES),
    "llama-tied": lambda: hf(model="llama", layers=4, overrides='{"tie_word_embeddings": true}', **_SIZES),
    "qwen2": lambda: hf(model="qwen2", layers=4, **_SIZES),
    "mixtral": lambda: hf(model="mixtral", layers=4, overrides='{"num_local_experts": 4}', **_SIZES),
    "bert": lambda: hf(model="bert", layers=4, **_SIZES),
    "t5": lambda: hf(model="t5", layers=5, **_SIZES),
    "vit": lambda: hf(model="vit", layers=4, hidden=64, heads=4, overrides='{"image_size": 32, "patch_size": 8}'),
    "llama-lora": lambda: AdaptedHf(hf(model="llama", layers=4, **_SIZES)),
}
OWN = {
    "plain-stack": lambda: Built(plain_stack),
    "shared-layers": lambda: Built(shared_layers),
    "one-shared-layer": lambda: Built(OneSharedLayer),
    "two-streams": lambda: Built(TwoStreams),
    "alternating": lambda: Built(alternating),
    "no-blocks": lambda: Built(no_blocks),
    "first-frozen": FirstFrozen,
    "conv-net": lambda: Built(ConvNet, shape=(3, 16, 16)),
}
ZOO = {**HF, **OWN}
