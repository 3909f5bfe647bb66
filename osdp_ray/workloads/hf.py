"""The built-in workload `hf`: any model that transformers can build from a configuration, on random data.

In goes the name of a model type (gpt2, llama, bert, t5, vit, ...), a configuration as JSON, or the path of one; nothing
is downloaded, and weights start as the model initialises them itself. Data are `num_samples` samples drawn once from
the seed and repeated in epochs, so that a model can learn them by heart and the loss falls.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from osdp_ray.errors import UsageError
from osdp_ray.workload import Workload

Batch = dict[str, torch.Tensor]

_INSTALL = "pip install transformers"
# Sizes of a small model where a type is named without any; None leaves the type's own default.
_SMALL = {"layers": 4, "hidden": 128, "heads": 4, "vocabulary": 512}
# Inner widths that configurations state on their own, as multiples of the hidden size.
_INNER_WIDTHS = ("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim")
_TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
_AUTO_CLASSES = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "image": "AutoModelForImageClassification",
}
_IGNORED_LABEL = -100
_MASKED_FRACTION = 0.15


class HfWorkload(Workload):
    """A transformers model from a configuration (a JSON-ready dict with `model_type`) for one task, on random data.

    `task` is 'causal', 'masked', 'seq2seq' or 'image'. Raises UsageError where transformers is missing or knows no
    such model.
    """

    name = "hf"

    def __init__(
        self,
        config: dict[str, Any],
        *,
        task: str,
        sequence: int = 128,
        num_samples: int = 512,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        attention: str = "sdpa",
    ) -> None:
        self.config, self.task, self.sequence, self.num_samples = config, task, sequence, num_samples
        self.learning_rate, self.weight_decay, self.attention = learning_rate, weight_decay, attention
        for name in ("sequence", "num_samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, and at least 1 is needed. Raise {name}.")

    def settings(self) -> dict[str, Any]:
        return dict(vars(self))

    def build_model(self) -> nn.Module:
        """The model for the task, without its cache of keys and values: only generation has a use for it."""
        transformers = _transformers()
        config = transformers.CONFIG_MAPPING[self.config["model_type"]].from_dict(self.config)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        auto_class = getattr(transformers, _AUTO_CLASSES[self.task])
        return auto_class.from_config(config, attn_implementation=self.attention)

    def export_config(self) -> dict[str, Any]:
        """The configuration as `from_pretrained` reads it, with the class for the task."""
        from transformers.models.auto import modeling_auto

        architecture = getattr(modeling_auto, _TASKS[self.task])[self.config["model_type"]]
        return {**self.config, "architectures": [architecture if isinstance(architecture, str) else architecture[0]]}

    def build_batches(self, rank: int, num_ranks: int, micro_batch: int, seed: int, start_step: int) -> Iterator[Batch]:
        step = start_step
        while True:
            first = (step * num_ranks + rank) * micro_batch
            samples = [self._sample(seed, (first + j) % self.num_samples) for j in range(micro_batch)]
            yield {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            step += 1

    def _sample(self, seed: int, index: int) -> Batch:
        digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        config = self.config
        if self.task == "image":
            size = config["image_size"]
            height, width = size if isinstance(size, list | tuple) else (size, size)
            pixels = torch.randn(config.get("num_channels", 3), height, width, generator=generator)
            num_labels = len(config.get("id2label") or (0, 1))
            return {"pixel_values": pixels, "labels": torch.randint(num_labels, (), generator=generator)}
        tokens = torch.randint(config["vocab_size"], (self.sequence,), generator=generator)
        if self.task == "seq2seq":
            labels = torch.randint(config["vocab_size"], (self.sequence,), generator=generator)
            return {"input_ids": tokens, "labels": labels}
        if self.task == "masked":
            hidden = torch.rand(self.sequence, generator=generator) < _MASKED_FRACTION
            hidden[0] = True  # a sample without any label has no loss
            return {
                "input_ids": tokens.masked_fill(hidden, config["vocab_size"] - 1),
                "labels": tokens.masked_fill(~hidden, _IGNORED_LABEL),
            }
        return {"input_ids": tokens, "labels": tokens.clone()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss that the model computes itself from `labels`."""
        return model(**batch).loss

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW in its fused form, which holds no temporaries while it steps."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)


def hf(
    model: str = "gpt2",
    layers: int = 0,
    hidden: int = 0,
    heads: int = 0,
    vocabulary: int = 0,
    sequence: int = 128,
    task: str = "",
    overrides: str = "",
    num_samples: int = 512,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
    attention: str = "sdpa",
) -> HfWorkload:
    """The workload that `osdp ... hf key=value` names. Raises UsageError before anything is started.

    `model` is a model type, the path of a `config.json` or of a folder with one, or the JSON itself. Sizes of 0 are
    those of the file, or small ones for a named type. `overrides` is JSON that is laid over the configuration. `task`
    is found by the model unless it is given.
    """
    given, is_type = _read(model)
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary}
    if is_type:
        sizes = {name: size or _SMALL[name] for name, size in sizes.items()}
    config = _configure(given, sizes, sequence, _parse(overrides, "overrides") if overrides else {})
    return HfWorkload(
        config,
        task=_task(config, task),
        sequence=sequence,
        num_samples=num_samples,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        attention=attention,
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"the workload 'hf' needs the package transformers, which cannot be imported ({error}). "
            f"Install it on every node: {_INSTALL}."
        ) from error
    return transformers


def _read(model: str) -> tuple[dict[str, Any], bool]:
    """The configuration that was named, and whether it was by a bare model type."""
    if model.lstrip().startswith("{"):
        return _parse(model, "model"), False
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                return _parse(file.read(), path), False
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}). Let this user read it.") from error
    return {"model_type": model}, True


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} of workload 'hf' is no JSON ({error}). Write it like '{{\"key\": 1}}'.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} of workload 'hf' is no JSON object. Write it like '{{\"key\": 1}}'.")
    return value


def _configure(
    given: dict[str, Any], sizes: dict[str, int], sequence: int, overrides: dict[str, Any]
) -> dict[str, Any]:
    """The whole configuration as transformers writes it, with the sizes that are not 0 put in."""
    mapping = _transformers().CONFIG_MAPPING
    kind = given.get("model_type", "")
    if kind not in mapping:
        raise UsageError(
            f"transformers knows no model type {kind!r}. Give model=gpt2, llama, bert, t5, vit or another type, "
            "the path of a config.json, or its JSON with a 'model_type'."
        )
    kind_class = mapping[kind]
    default = kind_class()
    fields = {
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "vocab_size": sizes["vocabulary"],
    }
    names = getattr(kind_class, "attribute_map", {})
    chosen = {names.get(field, field): size for field, size in fields.items() if size and hasattr(default, field)}
    if sizes["hidden"]:
        heads = sizes["heads"] or default.num_attention_heads
        chosen = {**_dependent(default, given, sizes["layers"], sizes["hidden"], heads), **chosen}
    wanted = {**given, **chosen, **overrides}
    if sizes["layers"] and "layer_types" not in overrides:
        wanted.pop("layer_types", None)  # one per layer, so it follows from their number
    try:
        config = kind_class(**{key: value for key, value in wanted.items() if key != "model_type"})
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"transformers refuses the sizes of model type {kind!r} ({str(error).splitlines()[-1].strip()}). "
            "Give sizes that fit each other, such as heads that divides hidden, or overrides='{...}'."
        ) from error
    if getattr(config, "max_position_embeddings", None) and config.max_position_embeddings < sequence:
        config.max_position_embeddings = sequence
    known = getattr(config, "vocab_size", 0)
    for field in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if known and isinstance(getattr(config, field, None), int) and getattr(config, field) >= known:
            setattr(config, field, known - 1)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    return json.loads(config.to_json_string(use_diff=False))


def _dependent(default: Any, given: dict[str, Any], layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """Sizes that follow the hidden size or the layers in most models, where the configuration does not give them."""
    follow: dict[str, int] = dict.fromkeys(_INNER_WIDTHS, 4 * hidden)
    follow |= dict.fromkeys(("head_dim", "d_kv"), hidden // heads) | {"word_embed_proj_dim": hidden}
    if layers:
        follow |= dict.fromkeys(("decoder_layers", "num_decoder_layers"), layers)
    groups = getattr(default, "num_key_value_heads", None)
    if groups:
        follow["num_key_value_heads"] = next(n for n in range(min(groups, heads), 0, -1) if heads % n == 0)
    return {
        field: value
        for field, value in follow.items()
        if field not in given and getattr(default, field, None) is not None
    }


def _task(config: dict[str, Any], task: str) -> str:
    from transformers.models.auto import modeling_auto

    kind = config["model_type"]
    possible = [name for name, mapping in _TASKS.items() if kind in getattr(modeling_auto, mapping)]
    if not task and possible:
        return possible[0]
    if task not in possible:
        raise UsageError(
            f"transformers has no model of type {kind!r} for task {task or 'any that this workload knows'!r}. "
            f"Give task={', '.join(possible)}."
            if possible
            else f"the model type {kind!r} has no language or image head in transformers. Write a Workload of your own."
        )
    return task
