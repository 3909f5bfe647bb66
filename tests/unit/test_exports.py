"""A save becomes safetensors that `from_pretrained` reads with the same logits, and weights come in from such files."""

import itertools
import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from osdp_ray.errors import SaveError, UsageError
from osdp_ray.execution import save_tensors
from osdp_ray.execution.exports import export
from osdp_ray.execution.saves import Save, save
from osdp_ray.execution.weights import check_weights, load_weights
from osdp_ray.modeling.splitting import is_splittable, split_operator
from tests.models import HF
from tests.oracle import events_of

INPUTS = {
    "vit": lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    "t5": lambda: {"input_ids": torch.arange(64).view(2, 32), "decoder_input_ids": torch.arange(20).view(2, 10)},
}
EXPORTED = ("gpt2", "opt", "llama", "llama-tied", "qwen2", "mixtral", "bert", "t5", "vit")


def split_all(model):
    """Every operator that can be is run as two slices, but those that share their weight."""
    uses = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    tied = {path for paths in uses.values() if len(paths) > 1 for path in paths}
    for path, module in list(model.named_modules()):
        if path not in tied and is_splittable(module) and module.weight.shape[1] % 2 == 0:
            split_operator(model, path, 2)
    return model


def saved(model, folder, config=None):
    optimizer = torch.optim.SGD(model.parameters())
    return save(folder, Save(step=1, config=config), model, optimizer)


def logits(model, name):
    torch.manual_seed(1)
    inputs = INPUTS.get(name, lambda: {"input_ids": torch.arange(64).view(2, 32)})()
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("name", EXPORTED)
def test_from_pretrained_reads_an_export_with_the_same_logits_bit_for_bit(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(save_tensors, "MAX_PIECE_BYTES", 4096)
    work = HF[name]()
    torch.manual_seed(0)
    model = work.build_model()
    expected = logits(model, name)
    saved(split_all(model), tmp_path / "run", work.export_config())
    export(tmp_path / "run", tmp_path / "out", max_file_bytes=300_000)

    architecture = getattr(transformers, work.export_config()["architectures"][0])
    again, told = architecture.from_pretrained(
        tmp_path / "out", attn_implementation=work.attention, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    assert torch.equal(logits(again, name), expected)
    listed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(listed.values())) > 1
    assert set(listed) == {key for file in (tmp_path / "out").glob("*.safetensors") for key in load_file(file)}


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "t5"])
def test_a_model_starts_from_what_save_pretrained_wrote_slice_by_slice(name, tmp_path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = HF[name]().build_model()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    torch.manual_seed(1)
    other = split_all(HF[name]().build_model())
    load_weights(tmp_path / "theirs", other)
    saved(other, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "ours")
    (file,) = (tmp_path / "ours").glob("*.safetensors")
    theirs = {
        key: value for part in (tmp_path / "theirs").glob("*.safetensors") for key, value in load_file(part).items()
    }
    ours = load_file(file)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


class Mixed(nn.Module):
    """Several kinds of numbers, a scalar, nothing at all, and two names for one weight."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(300, 40))
        self.short = nn.Parameter(torch.randn(7, 3).to(torch.bfloat16))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.one = nn.Linear(4, 6)
        self.other = nn.Linear(4, 6)
        self.other.weight = self.one.weight


def test_an_export_and_back_keeps_every_kind_of_number(tmp_path):
    model, other = Mixed(), Mixed()
    saved(model, tmp_path / "run")
    (file,) = export(tmp_path / "run", tmp_path / "out")
    assert load_file(file)["short"].dtype == torch.bfloat16
    for source in (tmp_path / "out", file, tmp_path / "run"):
        other = Mixed()
        load_weights(source, other)
        for name, tensor in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), (source, name)
    export(tmp_path / "run", tmp_path / "small", dtype="bf16")
    assert torch.equal(load_file(tmp_path / "small" / "model.safetensors")["wide"], model.wide.to(torch.bfloat16))
    assert torch.equal(load_file(tmp_path / "small" / "model.safetensors")["count"], model.count)


def test_a_file_is_laid_out_as_the_format_wants_it(tmp_path):
    saved(Mixed(), tmp_path / "run")
    (file,) = export(tmp_path / "run", tmp_path / "out")
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[-1][1] == len(data) - 8 - length
    assert all(first[1] == second[0] for first, second in itertools.pairwise(ends)), "there are holes"


def test_an_export_holds_one_piece_of_a_save_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(save_tensors, "MAX_PIECE_BYTES", 16_384)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    saved(model, tmp_path / "run")
    level = highest = 0
    for size in events_of(lambda: export(tmp_path / "run", tmp_path / "out", max_file_bytes=600_000)):
        level += size
        highest = max(highest, level)
    assert highest < 4 * 16_384 < 256 * 256 * 4
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_a_tensor_larger_than_a_file_has_one_for_itself(tmp_path):
    saved(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), tmp_path / "run")
    files = export(tmp_path / "run", tmp_path / "out", max_file_bytes=1000)
    assert [file.name for file in files] == [
        *(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert [list(load_file(file)) for file in files[:3]] == [["0.bias"], ["0.weight"], ["1.bias", "1.weight"]]


def test_an_export_to_where_there_is_one_already_or_no_space_is_refused(tmp_path, monkeypatch):
    saved(Mixed(), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UsageError, match=r"holds model.safetensors already. Give --out a folder without"):
        export(tmp_path / "run", tmp_path / "out")

    def full(handle, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"cannot take the export \(.*No space left.*\)\. Free space there"):
        export(tmp_path / "run", tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


def test_what_is_no_save_cannot_be_exported(tmp_path):
    with pytest.raises(SaveError, match=r"there is no save in it. Give a run that has saved"):
        export(tmp_path, tmp_path / "out")


def test_numbers_that_safetensors_cannot_hold_are_named(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("turns", torch.zeros(3, dtype=torch.complex64))
    saved(model, tmp_path / "run")
    with pytest.raises(SaveError, match=r"turns is of torch.complex64, which safetensors cannot hold.*Take it out"):
        export(tmp_path / "run", tmp_path / "out")


def test_weights_that_differ_are_listed_by_name_and_taken_in_part_when_asked(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    save_file(
        {"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4), "2.weight": torch.ones(1)}, tmp_path / "w.safetensors"
    )
    with pytest.raises(SaveError, match=r"lacks 1.bias, 1.weight; it has 2.weight, which .* lacks.*--init-partly"):
        load_weights(tmp_path, model)
    load_weights(tmp_path, model, strict=False)
    assert model[0].weight.eq(1).all()
    assert "it lacks 1.bias, 1.weight" in caplog.text
    with pytest.raises(SaveError, match=r"0.weight is \(4, 4\) in it, and \(5, 4\) here"):
        load_weights(tmp_path, nn.Sequential(nn.Linear(4, 5)), strict=False)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, r"there is no such file or folder. Give a folder or file of safetensors, a run, or a save"),
        (lambda path: path.mkdir(), r"there are no safetensors and no save in it. Give a folder or file"),
        (lambda path: path.write_bytes(b"x"), r"it is no safetensors file, and others can run code.*Give a folder or"),
    ],
    ids=["nothing", "an empty folder", "another file"],
)
def test_where_there_are_no_weights_a_run_does_not_start(tmp_path, make, problem):
    path = tmp_path / "weights.bin"
    make(path)
    with pytest.raises(SaveError, match=problem):
        check_weights(path)


def test_a_damaged_file_and_an_index_without_its_files_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(SaveError, match=r"model.safetensors cannot be read .*Fetch or export it anew"):
        load_weights(tmp_path, nn.Linear(2, 2))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "part-2.safetensors"}}')
    with pytest.raises(SaveError, match=r"its index names part-2.safetensors, which is not there. Fetch or export"):
        check_weights(tmp_path)


def test_weights_at_a_url_must_be_a_save():
    with pytest.raises(SaveError, match=r"there is no save at this URL. .*safetensors are read from disks"):
        check_weights("memory://nowhere")
