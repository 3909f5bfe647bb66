"""How to train, apart from what the plan decides."""

import dataclasses

RAY_FOLDER = "ray"  # of a run's directory: Ray Train's own bookkeeping, while an attempt runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """`save_every` and `eval_every` count steps, 0 is only at the end. `max_norm` None leaves gradients unclipped.
    `compiles`: blocks go through torch.compile.

    `async_saves`: training goes on while a save is written, for a copy of the state in host memory. `saves_to`: a
    folder or URL for the saves instead of the run's own folder. `init_from`: where a run that resumes nothing takes its
    weights from; `init_partly`: only those that both sides have.
    """

    num_steps: int
    seed: int = 0
    save_every: int = 0
    eval_every: int = 0
    max_norm: float | None = 1.0
    saves_kept: int = 2
    compiles: bool = False
    async_saves: bool = False
    saves_to: str = ""
    init_from: str = ""
    init_partly: bool = False
