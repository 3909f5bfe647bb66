"""The built-in workload `family`: the three kinds of models that OSDP was made for (arXiv 2209.13258, section 4).

    narrow   narrow and deep: many small operators. 48 layers of 2048, the GPT of its released code's README.
    wide     wide and shallow: few huge operators, where gathering one sets the peak. 4 layers of 8192, the largest
             hidden size of its published tables.
    mixed    inconsistent widths, one after the other: 16 layers of 1024, 16 of 2048, 8 of 4096 (sizes of our own).

All have the vocabulary of its scripts (30522). Their data are bytes, as of the workload `gpt`.
"""

import dataclasses

import torch
from torch import nn

from osdp_ray.errors import UsageError
from osdp_ray.workloads.gpt import GPT, Block, GptWorkload

VOCABULARY = 30522
HEAD_SIZE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers of one width."""

    layers: int
    hidden: int


FAMILIES = {
    "narrow": (Stage(layers=48, hidden=2048),),
    "wide": (Stage(layers=4, hidden=8192),),
    "mixed": (Stage(layers=16, hidden=1024), Stage(layers=16, hidden=2048), Stage(layers=8, hidden=4096)),
}


class WideningBlock(nn.Module):
    """The first block of a wider stage: [B, T, narrow] -> [B, T, hidden]."""

    def __init__(self, narrow: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.widen = nn.Linear(narrow, hidden)
        self.block = Block(hidden, hidden // HEAD_SIZE, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.widen(x))


class FamilyWorkload(GptWorkload):
    """A GPT whose blocks come in stages of different widths."""

    name = "family"

    def __init__(self, stages: tuple[Stage, ...], *, sequence: int = 512, data: str = "") -> None:
        first = stages[0]
        super().__init__(
            layers=sum(stage.layers for stage in stages),
            hidden=first.hidden,
            heads=first.hidden // HEAD_SIZE,
            sequence=sequence,
            vocabulary=VOCABULARY,
            data=data,
        )
        self.stages = [dataclasses.asdict(stage) for stage in stages]

    def build_model(self) -> GPT:
        model = super().build_model()
        blocks: list[nn.Module] = []
        narrow = self.stages[0]["hidden"]
        for stage in self.stages:
            hidden = stage["hidden"]
            for _ in range(stage["layers"]):
                same = Block(hidden, hidden // HEAD_SIZE, self.dropout)
                blocks.append(same if hidden == narrow else WideningBlock(narrow, hidden, self.dropout))
                narrow = hidden
        model.blocks = nn.ModuleList(blocks)
        model.norm = nn.LayerNorm(narrow)
        model.head = nn.Linear(narrow, self.vocabulary, bias=False)
        model.initialise()
        return model


def family(name: str, sequence: int = 512, data: str = "") -> FamilyWorkload:
    """The workload that `osdp ... family name=narrow` names. Raises UsageError for another name."""
    if name not in FAMILIES:
        raise UsageError(f"no family is called {name!r}. Use name={', '.join(FAMILIES)}.")
    return FamilyWorkload(FAMILIES[name], sequence=sequence, data=data)
