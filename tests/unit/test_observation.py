"""Peaks are exact bytes, samples survive files, and the hub passes news one way and commands the other."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from osdp_ray.errors import RecordError
from osdp_ray.observation import (
    AllocatorPeak,
    Observer,
    TelemetryHub,
    load_parquet,
    persistent_bytes,
    resident_bytes,
    save_parquet,
)
from osdp_ray.observation.allocator import AllocatorEvent, highest_sum
from osdp_ray.records.telemetry import Sample, Telemetry

SAMPLE = Sample(
    plan_index=0,
    rank=1,
    step=3,
    loss=2.0000000000000004,
    gradient_norm=0.1,
    learning_rate=3e-4,
    num_samples=8,
    step_s=0.25,
    data_s=0.01,
    forward_s=0.07,
    backward_s=0.13,
    optimizer_s=0.04,
    peak_bytes=2**40 + 1,
    persistent_bytes=2**33,
    reserved_bytes=None,
    resident_bytes=12345,
    num_retries=0,
)


def test_the_peak_of_a_cpu_step_is_exact_to_the_byte():
    peak = AllocatorPeak("cpu")
    with peak.measure(2, lambda: 1000) as memory:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(1 << 21, dtype=torch.uint8)
        del first
        third = torch.empty(1 << 19, dtype=torch.uint8)
        del second, third
    assert memory.peak_bytes == 1000 + (1 << 20) + (1 << 21)


def test_a_free_that_gloo_did_unseen_counts_when_the_waiting_thread_goes_on():
    copy_in_reduce_scatter = AllocatorEvent(10, 100, address=1, thread=1, collective_end_ns=12)
    events = [
        copy_in_reduce_scatter,
        AllocatorEvent(13, 30, address=2, thread=2),  # gloo's thread works while the caller waits
        AllocatorEvent(14, -30, address=2, thread=2),
        AllocatorEvent(20, 40, address=3, thread=1),  # the caller goes on: the copy is gone
    ]
    assert highest_sum(events) == 130
    kept = dataclasses.replace(copy_in_reduce_scatter, collective_end_ns=None)
    assert highest_sum([kept, *events[1:]]) == 140
    reused = AllocatorEvent(30, 50, address=1, thread=1)
    assert highest_sum([kept, reused]) == 150  # a loss outside of collectives is never guessed away


def test_a_step_that_only_frees_peaks_where_it_starts():
    held = [torch.empty(1 << 20, dtype=torch.uint8)]
    with AllocatorPeak("cpu").measure(2, lambda: 1 << 20) as memory:
        held.clear()
    assert memory.peak_bytes == 1 << 20


def test_the_second_third_and_every_fiftieth_step_are_measured_on_cpu_and_all_on_cuda():
    peak = AllocatorPeak("cpu")
    assert [step for step in range(1, 160) if peak.is_sampled(step)] == [2, 3, 50, 100, 150]
    assert [step for step in range(1, 160) if AllocatorPeak("cpu", sample_every=0).is_sampled(step)] == [2, 3]
    assert all(AllocatorPeak("cuda").is_sampled(step) for step in range(1, 5))


def test_an_unmeasured_step_has_no_peak_and_never_counts_what_lives():
    def fail():
        raise RuntimeError("counted")

    with AllocatorPeak("cpu").measure(1, fail) as memory:
        torch.empty(10)
    assert memory.peak_bytes is None


def test_persistent_bytes_count_each_storage_once_with_optimizer_state_and_padding():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.BatchNorm1d(10))
    model[1].weight = model[0].weight
    weights = 40 * 4
    norm = 2 * 10 * 4 + 2 * 10 * 4 + 8
    assert persistent_bytes(model, None) == weights + norm
    padded = torch.zeros(100)
    assert persistent_bytes(model, None, (padded[:3],)) == weights + norm + 400
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert persistent_bytes(model, optimizer) == 3 * weights + norm + 2 * (2 * 10 * 4) + 3 * 4


def test_resident_bytes_are_those_of_a_process_with_torch():
    assert resident_bytes() > 50 << 20


def test_parquet_gives_every_sample_back_unchanged(tmp_path):
    other = dataclasses.replace(SAMPLE, peak_bytes=None, reserved_bytes=7, gradient_norm=math.inf)
    telemetry = Telemetry(samples=(SAMPLE, other))
    save_parquet(telemetry, tmp_path / "telemetry.parquet")
    assert load_parquet(tmp_path / "telemetry.parquet") == telemetry
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry.parquet"]


def test_parquet_without_samples_is_readable(tmp_path):
    save_parquet(Telemetry(samples=()), tmp_path / "t.parquet")
    assert load_parquet(tmp_path / "t.parquet").samples == ()


def test_a_file_that_is_no_telemetry_is_refused_by_name(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "junk").write_text("no parquet")
    with pytest.raises(RecordError, match=r"junk: it is no readable Parquet file"):
        load_parquet(tmp_path / "junk")
    with pytest.raises(RecordError, match=r"it is no readable Parquet file \(\[Errno 2\]"):
        load_parquet(tmp_path / "missing")
    pq.write_table(pa.table({"rank": [1]}), tmp_path / "other")
    with pytest.raises(RecordError, match="has no column 'plan_index'"):
        load_parquet(tmp_path / "other")


def test_the_hub_gives_every_item_once_in_order_and_forgets_what_was_drained():
    hub = TelemetryHub()
    hub.push(0, [SAMPLE], [("saved", {"step": 3})])
    since, items = hub.drain(0)
    assert items == [SAMPLE, ("saved", {"step": 3})]
    assert hub.drain(0) == (since, items)  # an answer that was lost can be asked for again
    hub.push(1, [dataclasses.replace(SAMPLE, rank=0)], [])
    newer, items = hub.drain(since)
    assert [item.rank for item in items] == [0]
    assert hub.drain(newer) == (newer, [])
    assert len(hub._items) == 0


def test_what_the_driver_may_not_have_written_is_kept_for_a_save():
    hub = TelemetryHub()
    one, two = (
        [dataclasses.replace(SAMPLE, rank=rank, step=step) for step in (1, 2, 3)] for rank in (0, 1)
    )  # of two ranks
    hub.push(0, [], [], "worker 0")
    hub.push(1, [], [], "worker 1")
    hub.push(0, one, [])
    hub.push(1, two[:1], [("saved", {})])
    since, _ = hub.drain(0)
    assert hub.undrained() == (*one, *two[:1])  # handed out, and perhaps never taken in
    hub.drain(since)
    assert hub.undrained() == tuple(one[1:])  # step 1 is written, the others lack rank 1
    hub.push(1, two[1:], [])
    assert hub.undrained() == (*one[1:], *two[1:])
    since, _ = hub.drain(since)
    hub.drain(since)
    assert hub.undrained() == ()
    hub.push(0, one, [])
    hub.drain(hub.drain(since)[0])
    hub.set_command("")  # another attempt
    assert hub.undrained() == ()


def test_the_hub_answers_a_push_with_the_command():
    hub = TelemetryHub()
    assert hub.push(0, [], []) == ""
    hub.set_command("stop")
    assert hub.push(0, [], []) == "stop"
    hub.set_command("")
    assert hub.push(0, [], []) == ""


class RemoteMethod:
    """A method of an actor that answers when the test says so."""

    def __init__(self):
        self.calls = []

    def remote(self, *args):
        self.calls.append(args)
        return len(self.calls)


class Actor:
    def __init__(self):
        self.push = RemoteMethod()


def test_the_observer_buffers_between_pushes_and_pushes_a_measured_peak_at_once(monkeypatch):
    actor = Actor()
    observer = Observer(actor, run="test", rank=1, peak=AllocatorPeak("cpu"))
    monkeypatch.setattr(observer, "_gauges", type("NoGauges", (), {"set": lambda self, sample: None})())
    unmeasured = dataclasses.replace(SAMPLE, peak_bytes=None)
    observer.record(unmeasured)  # the first one goes at once
    observer.record(unmeasured)
    observer.record(unmeasured)
    assert [len(samples) for _, samples, _ in actor.push.calls] == [1]
    observer.record(SAMPLE)
    assert [len(samples) for _, samples, _ in actor.push.calls] == [1, 3]
    observer.note("saved", step=3)
    assert actor.push.calls[-1] == (1, [], [("saved", {"step": 3})])
