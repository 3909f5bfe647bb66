"""The corpus: what is read, how it is cut, and that any rank finds any sample again."""

import contextlib
import math
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from osdp_ray.errors import DataError
from osdp_ray.units import KIB
from osdp_ray.workloads.text import Corpus, data_bytes, open_corpus, unigram_entropy_nats


def numbered_corpus(num_bytes: int = 5_000, sequence: int = 7) -> Corpus:
    """A corpus whose windows can be told apart: every byte is drawn at random."""
    generator = torch.Generator().manual_seed(num_bytes)
    text = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return Corpus(text, sequence, "numbered")


def samples(corpus: Corpus, num_ranks: int, micro_batch: int, num_steps: int, seed: int = 0, start_step: int = 0):
    """The input rows of some steps in the order of the global batch."""
    ranks = [corpus.train_batches(rank, num_ranks, micro_batch, seed, start_step) for rank in range(num_ranks)]
    return torch.cat([next(rank)[0] for _ in range(num_steps) for rank in ranks])


def content(data: Path) -> bytes:
    return open_corpus(str(data), 1).text.numpy().tobytes()


def write_parquet(path: Path, columns: dict) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@contextlib.contextmanager
def folder_of_an_unprivileged_user():
    """A folder that everyone may enter, visited as a user for whom file modes count (root reads everything)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield folder, lambda: os.seteuid(user)
    finally:
        os.seteuid(user)
        shutil.rmtree(folder)


# What is read.


def test_the_default_corpus_is_the_source_of_the_standard_library_without_its_tests():
    text = open_corpus("", 128).text.numpy().tobytes()

    assert 5_000_000 < len(text) < 30_000_000
    assert len(text) == data_bytes("")
    assert Path(contextlib.__file__).read_bytes() in text
    assert b"class TestCase(object):" in text, "unittest is part of the library, its name notwithstanding"
    assert b"from test import support\nfrom test.support import" not in text


def test_a_file_is_read_as_its_bytes(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)))

    assert content(path) == bytes(range(256))


def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    for name, text in {"b.txt": b"bbbb", "a/z.txt": b"zzzz", "a.txt": b"aaaa"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    write_parquet(tmp_path / "c.parquet", {"text": ["cccc"]})

    assert content(tmp_path) == b"zzzz" + b"aaaa" + b"bbbb" + b"cccc\n"


def test_parquet_gives_its_text_column_or_its_only_column_of_strings_or_bytes(tmp_path):
    named = write_parquet(tmp_path / "named.parquet", {"title": ["x"] * 3, "text": ["one", None, "grün"]})
    only = write_parquet(tmp_path / "only.parquet", {"number": [1, 2], "body": [b"one", b"two"]})

    assert content(named) == "one\ngrün\n".encode()
    assert content(only) == b"one\ntwo\n"


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_parquet_of_every_kind_of_text_is_read(tmp_path, kind):
    rows = [b"one", b"two", b"one"] if "binary" in str(kind) else ["one", "two", "one"]
    path = write_parquet(tmp_path / "text.parquet", {"text": pa.array(rows, kind)})

    assert content(path) == b"one\ntwo\none\n"


def test_parquet_strings_that_are_no_utf_8_are_read_as_bytes(tmp_path):
    text = pa.array([b"caf\xe9"]).view(pa.string())

    assert content(write_parquet(tmp_path / "latin.parquet", {"text": text})) == b"caf\xe9\n"


def test_a_file_that_changed_is_read_again_and_an_unchanged_one_is_not(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"before")
    before = open_corpus(str(path), 1).text
    assert open_corpus(str(path), 2).text is before

    path.write_bytes(b"and after")
    assert content(path) == b"and after"
    assert data_bytes(str(path)) == 9


# How it is cut.


@pytest.mark.parametrize("num_bytes", [16, 17, 160, 5_000, 3 * 20 * 64 * KIB, 3 * 20 * 64 * KIB + 5])
def test_windows_of_both_parts_share_no_byte_and_leave_none_of_the_text_far_behind(num_bytes):
    sequence = 7
    corpus = numbered_corpus(num_bytes, sequence)
    uses = torch.zeros(2, num_bytes, dtype=torch.int64)
    for part, starts in enumerate((corpus._held_out_starts, corpus._train_starts)):
        assert starts.numel() > 0
        for offset in range(sequence + 1):
            uses[part, starts + offset] += 1

    assert not (uses[0].bool() & uses[1].bool()).any(), "held-out text is never trained on"
    num_runs = 2 * (num_bytes // min(20 * 64 * KIB, num_bytes) + 1)
    assert (uses.sum(0) == 0).sum() <= num_runs * sequence
    if num_bytes >= 160:
        assert uses[0].bool().float().mean() == pytest.approx(0.05, abs=0.03)


def test_targets_are_the_inputs_one_byte_later():
    inputs, targets = next(numbered_corpus().train_batches(0, 1, 5, 0, 0))

    assert inputs.shape == targets.shape == (5, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_global_batch_holds_the_same_samples_in_the_same_order_however_it_is_divided():
    corpus = numbered_corpus()
    expected = samples(corpus, num_ranks=1, micro_batch=12, num_steps=4)

    for num_ranks, micro_batch in ((1, 4), (2, 6), (3, 2), (4, 3), (12, 1)):
        num_steps = 48 // (num_ranks * micro_batch)
        assert torch.equal(samples(corpus, num_ranks, micro_batch, num_steps), expected)


def test_every_epoch_holds_every_window_once_in_an_order_of_its_own():
    corpus = numbered_corpus(400)
    num_windows = corpus.num_train_windows

    rows = samples(corpus, num_ranks=1, micro_batch=1, num_steps=2 * num_windows).tolist()

    first, second = rows[:num_windows], rows[num_windows:]
    assert len({tuple(row) for row in first}) == num_windows
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_order_depends_on_the_seed_alone():
    assert torch.equal(samples(numbered_corpus(), 1, 8, 2, seed=1), samples(numbered_corpus(), 1, 8, 2, seed=1))
    assert not torch.equal(samples(numbered_corpus(), 1, 8, 2, seed=1), samples(numbered_corpus(), 1, 8, 2, seed=2))


def test_batches_go_on_at_any_step_even_in_a_later_epoch():
    corpus = numbered_corpus(400)  # 53 windows, so that step 30 is in the fifth epoch
    assert corpus.num_train_windows < 30 * 2 * 4

    whole = samples(corpus, num_ranks=2, micro_batch=4, num_steps=40)

    assert torch.equal(samples(corpus, 2, 4, num_steps=10, start_step=30), whole[30 * 8 :])


# What is held out.


@pytest.mark.parametrize(("num_ranks", "micro_batch"), [(1, 1), (1, 5), (2, 4), (3, 4), (4, 16), (4, 5), (48, 3)])
def test_held_out_windows_are_the_same_for_every_number_of_ranks_and_micro_batch(num_ranks, micro_batch):
    corpus = numbered_corpus(100_000)
    expected = torch.cat([inputs for inputs, _ in corpus.held_out_batches(0, 1, 48, 48)])
    assert len(expected) == 48

    per_rank = [corpus.held_out_batches(rank, num_ranks, micro_batch, 48) for rank in range(num_ranks)]

    sizes = {len(inputs) for batches in per_rank for inputs, _ in batches}
    assert len({len(batches) for batches in per_rank}) == 1, "equally many micro-batches on every rank"
    assert len(sizes) == 1, "the mean of batches is the mean of windows"
    assert max(sizes) <= micro_batch
    rows = torch.cat([inputs for batches in per_rank for inputs, _ in batches])
    assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_where_ranks_do_not_divide_the_held_out_windows_the_last_ones_stay_out():
    corpus = numbered_corpus(100_000)
    per_rank = [corpus.held_out_batches(rank, 5, 4, 48) for rank in range(5)]

    assert [sum(len(inputs) for inputs, _ in batches) for batches in per_rank] == [9] * 5


def test_every_rank_has_a_held_out_window_even_where_there_are_fewer_than_ranks():
    corpus = numbered_corpus(16)
    assert corpus.num_held_out_windows == 1

    assert [len(corpus.held_out_batches(rank, 3, 4, 48)) for rank in range(3)] == [1, 1, 1]


def test_unigram_entropy_is_that_of_the_byte_frequencies():
    def entropy(text: bytes) -> float:
        return unigram_entropy_nats(torch.tensor(list(text), dtype=torch.uint8))

    assert entropy(b"aaaa") == 0
    assert entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert entropy(b"abcc") == pytest.approx(1.5 * math.log(2))


# What cannot be read.


def test_a_missing_path_is_told_from_others(tmp_path):
    for read in (lambda path: open_corpus(path, 8), data_bytes):
        with pytest.raises(DataError, match=r"nowhere: there is no such file or folder\. Correct the path"):
            read(str(tmp_path / "nowhere"))


def test_text_without_a_byte_names_another_data(tmp_path):
    (tmp_path / "empty").touch()
    write_parquet(tmp_path / "empty.parquet", {"text": pa.array([], pa.string())})
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "zeros").write_bytes(b"\0" * 100)

    for name in ("empty", "empty.parquet", "images"):
        with pytest.raises(DataError, match=r"it holds no text \(0 bytes\)\. Give another --data"):
            open_corpus(str(tmp_path / name), 8)


def test_a_folder_without_a_file_names_another_data(tmp_path):
    (tmp_path / ".hidden").touch()
    with pytest.raises(DataError, match=r"holds no file that is neither hidden nor special\. Give another --data"):
        open_corpus(str(tmp_path), 8)


def test_an_interpreter_without_its_sources_asks_for_data(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"python-stdlib: the folder .* holds no source file\. Give another --data"):
        open_corpus("", 8)


def test_something_that_is_no_file_names_another_data():
    with pytest.raises(DataError, match=r"neither a file nor a folder\. Give another --data"):
        open_corpus("/dev/null", 8)


def test_text_shorter_than_a_sequence_in_both_parts_names_the_longest_that_would_do(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 100)

    with pytest.raises(DataError, match=r"100 bytes are shorter .* 258 bytes\. Lower --seq to at most 49"):
        open_corpus(str(path), 128)
    corpus = open_corpus(str(path), 49)
    assert corpus.num_train_windows == corpus.num_held_out_windows == 1


def test_an_unreadable_file_or_folder_asks_for_permission():
    with folder_of_an_unprivileged_user() as (folder, become_owner):
        become_owner()
        (folder / "secret").write_bytes(b"x" * 100)
        (folder / "secret").chmod(0)
        (folder / "closed").mkdir()
        (folder / "closed" / "text").write_bytes(b"x" * 100)
        (folder / "closed").chmod(0)
        if os.geteuid() == 0:
            os.seteuid(65534)
        for name in ("secret", "closed", "closed/text"):
            with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)\. Let this user read it"):
                open_corpus(str(folder / name), 8)
        become_owner()
        (folder / "closed").chmod(0o700)


def test_parquet_without_one_text_column_names_the_columns(tmp_path):
    none = write_parquet(tmp_path / "none.parquet", {"number": [1], "other": [2.0]})
    two = write_parquet(tmp_path / "two.parquet", {"title": ["a"], "body": ["b"]})

    with pytest.raises(DataError, match=r"no column of text among number, other\. Name the column to read 'text'"):
        open_corpus(str(none), 8)
    with pytest.raises(DataError, match=r"2 columns of strings or bytes \(title, body\) .* read 'text'"):
        open_corpus(str(two), 8)


def test_damaged_parquet_asks_to_write_it_again(tmp_path):
    path = write_parquet(tmp_path / "text.parquet", {"text": [f"row {i}" for i in range(1000)]})
    whole = path.read_bytes()
    damages = {"cut": whole[:-20], "no": b"plain text", "body": whole[:4] + b"\xff" * 400 + whole[404:], "none": b""}
    for name, damaged in damages.items():
        other = tmp_path / f"{name}.parquet"
        other.write_bytes(damaged)
        with pytest.raises(DataError, match=r"no readable Parquet file \(.+\)\. Write it again"):
            open_corpus(str(other), 8)


def test_data_errors_survive_pickling(tmp_path):
    with pytest.raises(DataError) as caught:
        open_corpus(str(tmp_path / "nowhere"), 8)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
