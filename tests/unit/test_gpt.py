"""The built-in workload: a model that can be built anywhere, its settings, and what it learns."""

import itertools
import json
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from osdp_ray.errors import DataError, UsageError
from osdp_ray.workload import load_workload
from osdp_ray.workloads.gpt import GPT, Block, GptWorkload, gpt

SMALL = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only slow operations of this size down, and by much where other processes are busy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build(seed: int = 0, **changes) -> GPT:
    torch.manual_seed(seed)
    return GptWorkload(**{**SMALL, **changes}).build_model()


class NoValues(TorchDispatchMode):
    """Fails where a value is read from a tensor."""

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return function(*args, **(kwargs or {}))


def test_modules_have_the_names_that_plans_and_saves_use():
    names = {name for name, _ in build().named_parameters()}
    operators = {name.rpartition(".")[0] for name in names}

    block = ("norm_1", "attention.qkv", "attention.projection", "norm_2", "mlp.up", "mlp.down")
    blocks = {f"blocks.{i}.{name}" for i in range(2) for name in block}
    assert operators == {"token_embedding", "position_embedding", "norm", "head"} | blocks


def test_logits_depend_on_no_later_token():
    model = build().eval()
    inputs = torch.randint(0, 256, (3, 16))
    changed = inputs.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256

    logits, others = model(inputs), model(changed)

    assert logits.shape == (3, 16, 256)
    assert torch.equal(logits[:, :10], others[:, :10])
    assert not torch.allclose(logits[:, 10:], others[:, 10:])


def test_attention_is_the_softmax_of_scaled_products():
    attention = build().blocks[0].attention
    x = torch.randn(2, 5, 32)
    query, key, value = (part.view(2, 5, 2, 16).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=-1))
    scores = (query @ key.transpose(-1, -2)) / 4
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    expected = attention.projection((scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 5, 32))

    torch.testing.assert_close(attention(x), expected)


def test_a_block_takes_and_returns_one_tensor_and_leaves_its_input_alone():
    block = Block(32, 2, 0.0)
    x = torch.randn(2, 5, 32)
    before = x.clone()

    assert block(x).shape == x.shape
    assert torch.equal(x, before)


def test_initial_weights_are_those_of_gpt_2():
    model = build(hidden=256, layers=8, sequence=128)

    for weight in (model.token_embedding.weight, model.head.weight, model.blocks[3].attention.qkv.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (model.blocks[3].attention.projection.weight, model.blocks[3].mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert all(
        not module.bias.any()
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not model.head
    )


def test_the_model_is_built_on_the_meta_device_and_reads_no_value():
    with torch.device("meta"), NoValues():
        model = GptWorkload(**SMALL, dropout=0.1).build_model()

    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not list(model.buffers())


def test_a_tied_head_is_the_embedding():
    model = build(tied=True)
    assert model.head.weight is model.token_embedding.weight
    assert build().head.weight is not build().token_embedding.weight


def test_dropout_acts_in_training_only_and_not_at_all_by_default():
    inputs = torch.randint(0, 256, (2, 16))
    plain, dropped = build().train(), build(dropout=0.5).train()

    assert torch.equal(plain(inputs), plain(inputs))
    assert not torch.equal(dropped(inputs), dropped(inputs))
    assert torch.equal(dropped.eval()(inputs), plain.eval()(inputs))


def test_the_workload_learns_a_text_it_has_never_seen_better_than_its_unigrams(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"%d times two is %d.\n" % (i, 2 * i) for i in range(5_000)))
    workload = gpt(**SMALL, data=str(path), learning_rate=1e-2, warmup_steps=5)
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model.parameters())
    scheduler = workload.build_scheduler(optimizer, 60)
    for batch in itertools.islice(workload.build_batches(0, 1, 8, 0, 0), 60):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        scheduler.step()

    with torch.no_grad():
        losses = [workload.loss(model, batch).item() for batch in workload.build_eval_batches(0, 1, 8)]

    assert len(losses) == 6
    assert sum(losses) / len(losses) < 0.8 * workload.unigram_entropy_nats()


def test_the_first_loss_is_that_of_a_guess_among_all_bytes():
    workload = GptWorkload(**SMALL)
    loss = workload.loss(build(), next(workload.build_batches(0, 1, 4, 0, 0)))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    workload = GptWorkload(**SMALL, learning_rate=0.5, warmup_steps=4)
    optimizer = workload.build_optimizer(build().parameters())
    scheduler = workload.build_scheduler(optimizer, 20)
    rates = []
    for _ in range(25):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:21]))
    assert rates[20:] == pytest.approx([0.05] * 5)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_run_shorter_than_the_warm_up_still_learns(num_steps):
    workload = GptWorkload(**SMALL, learning_rate=0.5, warmup_steps=20)
    optimizer = workload.build_optimizer(build().parameters())
    scheduler = workload.build_scheduler(optimizer, num_steps)
    for _ in range(num_steps):
        assert 0.05 <= optimizer.param_groups[0]["lr"] <= 0.5
        optimizer.step()
        scheduler.step()


def test_the_schedule_goes_on_from_its_saved_state():
    workload = GptWorkload(**SMALL)

    def schedule():
        return workload.build_scheduler(workload.build_optimizer(build().parameters()), 30)

    whole, resumed = schedule(), schedule()
    for _ in range(12):
        whole.optimizer.step()
        whole.step()
    resumed.load_state_dict(pickle.loads(pickle.dumps(whole.state_dict())))
    resumed.optimizer.step()
    whole.optimizer.step()
    resumed.step()
    whole.step()

    assert resumed.get_last_lr() == whole.get_last_lr()


def test_a_workload_travels_by_pickle_and_keeps_its_hash():
    workload = gpt(**SMALL)
    copy = pickle.loads(pickle.dumps(workload))

    assert json.loads(json.dumps(workload.settings())) == copy.settings()
    assert workload.hash() == copy.hash()
    assert copy.blocks == ("blocks",)


def test_the_hash_tells_settings_and_data_apart(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 1000)
    hashes = [GptWorkload(**SMALL).hash(), GptWorkload(**{**SMALL, "layers": 3}).hash()]
    hashes.append(GptWorkload(**SMALL, data=str(path)).hash())
    path.write_bytes(b"x" * 1001)
    hashes.append(GptWorkload(**SMALL, data=str(path)).hash())

    assert len(set(hashes)) == 4


def test_a_relative_path_is_kept_as_an_absolute_one_for_workers_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    monkeypatch.chdir(tmp_path)
    workload = gpt(**SMALL, data="text")
    monkeypatch.chdir("/")

    assert next(workload.build_batches(0, 1, 2, 0, 0))[0].shape == (2, 16)


def test_without_held_out_windows_there_is_no_evaluation():
    assert GptWorkload(**SMALL, held_out_windows=0).build_eval_batches(0, 1, 4) is None


def test_the_command_line_finds_it_by_name_with_its_settings():
    workload = load_workload(
        "gpt", {"layers": "1", "hidden": "48", "heads": "3", "learning_rate": "1e-4", "tied": "true"}
    )

    assert isinstance(workload, GptWorkload)
    assert (workload.layers, workload.hidden, workload.heads) == (1, 48, 3)
    assert (workload.learning_rate, workload.tied) == (1e-4, True)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"hidden": 128, "heads": 3}, r"3 heads do not divide a hidden size of 128\. .* --heads .* 2, or --hidden 129"),
        ({"hidden": 2, "heads": 4}, r"--heads that divides it, such as 2, or --hidden 4"),
        ({"layers": 0}, r"layers is 0, .* Raise --layers"),
        ({"hidden": -8}, r"hidden is -8, .* Raise --hidden"),
        ({"heads": 0}, r"heads is 0, .* Raise --heads"),
        ({"sequence": 0}, r"sequence is 0, .* Raise --seq"),
        ({"learning_rate": 0.0}, r"learning rate of 0\.0 .* Give --lr above 0"),
        ({"learning_rate": math.inf}, r"learning rate of inf .* Give --lr above 0"),
        ({"learning_rate": math.nan}, r"learning rate of nan .* Give --lr above 0"),
        ({"warmup_steps": -1}, r"warmup_steps is -1, below 0\. Give warmup_steps=0 or more"),
        ({"weight_decay": math.nan}, r"weight_decay is nan, .* Give weight_decay=0 or more"),
        ({"held_out_windows": -2}, r"held_out_windows is -2, .* Give held_out_windows=0 or more"),
        ({"dropout": 1.0}, r"dropout is 1\.0, no fraction below 1\. Give dropout=0"),
    ],
)
def test_settings_that_make_no_model_name_their_flag(settings, remedy):
    with pytest.raises(UsageError, match=remedy):
        gpt(**settings)


def test_a_vocabulary_below_that_of_bytes_is_refused():
    with pytest.raises(UsageError, match=r"vocabulary is 255, and bytes take 256 values\. Raise vocabulary"):
        GptWorkload(**SMALL, vocabulary=255)


def test_data_that_cannot_be_used_is_told_before_anything_is_started(tmp_path):
    with pytest.raises(DataError, match="Correct the path"):
        gpt(**SMALL, data=str(tmp_path / "nowhere"))
    (tmp_path / "short").write_bytes(b"x" * 20)
    with pytest.raises(DataError, match="Lower --seq to at most 9"):
        gpt(**SMALL, data=str(tmp_path / "short"))
