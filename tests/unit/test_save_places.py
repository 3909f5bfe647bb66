"""Saves at URLs: fsspec's and pyarrow's filesystems, committed by the record that is written last."""

import json
import pickle
import threading

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from osdp_ray.errors import SaveError, UsageError
from osdp_ray.execution.exports import export
from osdp_ray.execution.save_files import Place
from osdp_ray.execution.save_index import read_index
from osdp_ray.execution.save_writing import SaveWriter
from osdp_ray.execution.saves import Save, latest_save, list_saves, load, read_save, save
from osdp_ray.execution.weights import load_weights
from osdp_ray.resuming import require_no_saves


class Slow(MemoryFileSystem):
    """Files are opened for writing only once `gate` is open; those whose names hold `broken` fail."""

    protocol, gate, broken, opened = "slow", threading.Event(), "", []
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("slow://", "memory://"))

    def _open(self, path, mode="rb", **settings):
        if mode == "wb":
            type(self).opened.append(path)
            assert self.gate.wait(30)
            if self.broken and self.broken in path:
                raise OSError(5, "Input/output error")
        return super()._open(path, mode, **settings)


@pytest.fixture(autouse=True)
def empty_stores():
    fsspec.register_implementation("slow", Slow, clobber=True)
    for kind in (MemoryFileSystem, Slow):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    Slow.gate.set()
    Slow.broken, Slow.opened = "", []


def build(value=0.0):
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model, optimizer, value)
    return model, optimizer


def fill(model, optimizer, value):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for tensor in (*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())):
        tensor.detach().fill_(value)


def values_of(model, optimizer):
    tensors = (*model.parameters(), *(v for state in optimizer.state.values() for v in state.values()))
    return {value for tensor in tensors for value in tensor.unique().tolist()}


def loaded(place):
    model, optimizer = build()
    load(place, model, optimizer)
    return values_of(model, optimizer)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://", "slow://"])
def test_saves_are_listed_loaded_exported_and_dropped_at_any_place(tmp_path, scheme):
    run = f"{scheme}{tmp_path}/run"
    assert latest_save(run) is None
    for step in (1, 2, 10):
        model, optimizer = build(float(step))
        where = save(run, Save(step=step), model, optimizer, keep=2)
        assert str(where) == f"{run}/saves/step-{step:08d}"
    assert [read_save(path).step for path in list_saves(run)] == [2, 10]
    assert latest_save(run) == where
    assert loaded(where) == {10.0}
    export(run, tmp_path / "out")
    other = nn.Linear(5, 3)
    load_weights(tmp_path / "out", other)
    assert other.weight.eq(10).all()
    load_weights(run, other)


def test_at_a_url_a_save_without_its_record_is_none_and_is_cleared_away():
    for step in (1, 2):
        save("memory://run", Save(step=step), *build(float(step)))
    Place("memory://run", "saves", "step-00000002").fs.rm("/run/saves/step-00000002/save.json")
    assert [read_save(path).step for path in list_saves("memory://run")] == [1]
    save("memory://run", Save(step=3), *build(3.0))
    assert Place("memory://run", "saves").names() == ["step-00000001", "step-00000003"]


def test_the_record_is_written_after_all_else():
    save("slow://run", Save(step=1), *build(1.0))
    assert [path.rpartition("/")[2] for path in Slow.opened][-1] == "save.json"


def test_what_fsspec_lacks_a_package_for_is_opened_by_pyarrow(tmp_path, monkeypatch):
    def lacks(url, **settings):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", lacks)
    run = f"file://{tmp_path}/run"
    assert "arrow" in type(Place(run).fs).__module__
    for step in (1, 2, 3):
        save(run, Save(step=step), *build(float(step)))
    assert [read_save(path).step for path in list_saves(run)] == [2, 3]
    assert loaded(latest_save(run)) == {3.0}


def test_a_url_that_nothing_knows_is_refused_with_both_reasons():
    with pytest.raises(UsageError, match=r"cannot go to nowhere://x: fsspec says .*pyarrow .*Install the package that"):
        save("nowhere://x", Save(step=1), *build())


def test_a_new_run_refuses_a_place_that_holds_the_saves_of_another():
    require_no_saves("")
    require_no_saves("memory://run")
    save("memory://run", Save(step=1), *build())
    with pytest.raises(
        UsageError, match=r"holds a save of another run \(memory://run/saves/step-00000001\).*--saves-to"
    ):
        require_no_saves("memory://run")


def test_a_save_in_the_background_holds_the_state_as_it_was_though_training_goes_on():
    Slow.gate.clear()
    model, optimizer = build(1.0)
    writer = SaveWriter("slow://run", keep=2, in_background=True)
    writer.start(Save(step=1), model, optimizer, None)
    fill(model, optimizer, 2.0)
    assert writer.outcomes() == []
    assert latest_save("slow://run") is None
    Slow.gate.set()
    writer.wait()
    (outcome,) = writer.outcomes()
    assert (outcome.step, outcome.error) == (1, None)
    assert outcome.stall_s < outcome.seconds
    assert loaded(outcome.path) == {1.0}


def test_at_most_one_save_is_in_flight():
    Slow.gate.clear()
    model, optimizer = build(1.0)
    writer = SaveWriter("slow://run", keep=2, in_background=True)
    writer.start(Save(step=1), model, optimizer, None)
    threading.Timer(0.3, Slow.gate.set).start()
    writer.start(Save(step=2), model, optimizer, None)  # waits for the first one
    assert [outcome.step for outcome in writer.outcomes()][:1] == [1]
    writer.wait()
    assert read_save(latest_save("slow://run")).step == 2


@pytest.mark.parametrize("broken", ["0_0.distcp", ".metadata", "save.json"])
@pytest.mark.parametrize("in_background", [False, True])
def test_whatever_file_cannot_be_written_the_save_before_it_stays_and_the_next_is_tried(broken, in_background):
    model, optimizer = build(1.0)
    writer = SaveWriter("slow://run", keep=1, in_background=in_background)
    steps = {1: "", 2: broken, 3: ""}
    for step, Slow.broken in steps.items():
        fill(model, optimizer, float(step))
        writer.start(Save(step=step), model, optimizer, None)
        writer.wait()
        (outcome,) = writer.outcomes()
        assert (outcome.error is None) == (step != 2)
        assert read_save(latest_save("slow://run")).step == {1: 1, 2: 1, 3: 3}[step]
        if step == 2:
            assert "step-00000002: it cannot be written (rank 0: OSError: [Errno 5]" in str(outcome.error) or (
                "it cannot be written (OSError: [Errno 5] Input/output error)" in str(outcome.error)
            )
            assert Place("slow://run", "saves").names() == ["step-00000001"]
    assert loaded(latest_save("slow://run")) == {3.0}


def test_state_that_a_save_cannot_hold_is_told_as_a_save_that_failed():
    model, optimizer = build()
    optimizer.param_groups[0]["odd"] = object()
    writer = SaveWriter("memory://run", keep=1, in_background=True)
    writer.start(Save(step=1), model, optimizer, None)
    (outcome,) = writer.outcomes()
    assert "optimizer setting 'odd' holds a object" in str(outcome.error)


def test_a_thread_that_fails_in_another_way_is_told_as_well(monkeypatch):
    def lost(*arguments, **settings):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("osdp_ray.execution.save_writing.write", lost)
    writer = SaveWriter("memory://run", keep=1, in_background=True)
    writer.start(Save(step=1), *build(), None)
    writer.wait()
    (outcome,) = writer.outcomes()
    assert "its thread failed (RuntimeError: Connection closed by peer). Leave out --async-saves" in str(outcome.error)


def test_the_save_of_a_newer_release_is_told_from_a_damaged_one_and_that_of_an_older_one_is_read():
    where = save("memory://run", Save(step=4, num_samples=9), *build(4.0))
    place = Place(where)
    values = json.loads(place.read("save.json"))
    for key in ("model_values", "config"):
        del values[key]
    place.write("save.json", json.dumps(values | {"schema_version": 1}).encode())
    assert (read_save(where).num_samples, loaded(where)) == (9, {4.0})
    place.write("save.json", json.dumps(values | {"schema_version": 99, "later": 1}).encode())
    with pytest.raises(SaveError, match=r"a newer release made it: its schema_version is 99,.* up to 2\. Install"):
        read_save(where)
    place.write("save.json", b"{")
    with pytest.raises(SaveError, match=r"its save.json is damaged .*Delete this folder"):
        read_save(where)


def test_an_index_that_lacks_elements_or_points_outside_or_lists_more_than_tensors_is_refused():
    where = save("memory://run", Save(step=4), *build(4.0))
    place = Place(where)
    index = read_index(place)

    def refused(match):
        place.write(".metadata", pickle.dumps(index))
        with pytest.raises(SaveError, match=match):
            loaded(where)

    chunks = index.state_dict_metadata["model.weight"].chunks
    removed = chunks.pop()
    refused(r"it has 0 of the 15 elements of model.weight.*Delete this folder")
    chunks.append(removed)
    stored = next(iter(index.storage_data.values()))
    stored.relative_path = "../../secret"
    refused(r"its index names the file '../../secret' outside of it.*Delete this folder")
    index.state_dict_metadata["more"] = BytesStorageMetadata()
    refused(r"its index .metadata lists more than tensors.*Delete this folder")


def test_a_record_that_cannot_be_read_is_told_with_the_reason(tmp_path):
    where = save(tmp_path, Save(step=4), *build(4.0))
    (where / "save.json").unlink()
    (where / "save.json").mkdir()
    with pytest.raises(SaveError, match=r"its save.json cannot be read \(.*directory.*Delete this folder"):
        read_save(where)


def test_an_old_save_that_cannot_be_deleted_fails_nothing(tmp_path, monkeypatch, caplog):
    def keeps(path):
        raise OSError(13, "Permission denied")

    save(tmp_path, Save(step=1), *build(1.0), keep=1)
    monkeypatch.setattr("osdp_ray.execution.save_files.shutil.rmtree", keeps)
    where = save(tmp_path, Save(step=2), *build(2.0), keep=1)
    assert "step-00000001 cannot be deleted ([Errno 13] Permission denied)" in caplog.text
    assert list_saves(tmp_path) == [where]
