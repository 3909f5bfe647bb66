"""What one arrangement saves on four ranks every other one reads on two, and on one, bit for bit, slices included.

Four ranks save all cases, two ranks and then this process load them: three worlds, many cases each.
"""

import json
import os
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from osdp_ray.execution import save_tensors
from osdp_ray.execution.apply import parallelize
from osdp_ray.execution.saves import Save, latest_save, load, save
from osdp_ray.planning.choices import CHOICES_OF_NODES
from tests.distributed.arrangements import (
    MODELS,
    OPTIMIZERS,
    arrange,
    differences,
    fill_with_known,
    optimizer_of,
    random_plan,
)
from tests.oracle import events_of
from tests.ranks import free_port, start_ranks

NUM_CASES = 34
PLANNED = (1, 2, 4)  # of the models, those that are arranged by plans; all others by hand
SMALL_PIECE_BYTES = 2048


def cases():
    """(number, model, optimizer, whether by a plan, whether pieces are small) of every case."""
    rng = random.Random(3)
    names = list(MODELS)
    for number in range(NUM_CASES):
        yield number, names[number % len(names)], rng.choice(list(OPTIMIZERS)), number % 5 in PLANNED, number % 2 == 0


def built(name, kind, *, seed, is_planned, has_state):
    torch.manual_seed(seed)
    model, rng = MODELS[name](), random.Random(seed)
    if is_planned and dist.is_initialized():
        num_ranks = dist.get_world_size()
        nodes = (2, num_ranks // 2) if num_ranks > 2 else (num_ranks,)
        parallelize(model, random_plan(model, rng, nodes), device_type="cpu")
    else:
        arrange(model, rng)
    return model, optimizer_of(model, kind, has_state=has_state)


def save_all(rank, num_ranks, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    whole_bytes = save_tensors.MAX_PIECE_BYTES
    for number, name, kind, is_planned, is_small in cases():
        save_tensors.MAX_PIECE_BYTES = SMALL_PIECE_BYTES if is_small else whole_bytes
        model, optimizer = built(name, kind, seed=number, is_planned=is_planned, has_state=True)
        fill_with_known(model, optimizer)
        save(f"{folder}/{number}", Save(step=1, workload=name), model, optimizer)
    dist.destroy_process_group()


def load_all(folder):
    """Case -> what differs after loading under another arrangement, and how many tensors there are."""
    found = {}
    for number, name, kind, is_planned, _ in cases():
        model, optimizer = built(name, kind, seed=1000 + number, is_planned=is_planned, has_state=False)
        load(latest_save(f"{folder}/{number}"), model, optimizer)
        found[number] = differences(model, optimizer)
    return found


def load_on(rank, num_ranks, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    found = load_all(folder)
    with open(f"{folder}/loaded-{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def spawn(work, num_ranks, *arguments):
    port = free_port()
    start_ranks(work, (num_ranks, port, *arguments), num_ranks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    spawn(save_all, 4, str(folder))
    return folder


def test_plans_of_the_cases_split_operators_and_mix_choices():
    plans = [
        random_plan(MODELS[name](), random.Random(number), (2, 2))
        for number, name, _, is_planned, _ in cases()
        if is_planned
    ]
    units = [unit for plan in plans for section in plan.sections for unit in section.units]
    assert sum(any(section.splits for section in plan.sections) for plan in plans) > 10
    assert {unit.choice for unit in units} == set(CHOICES_OF_NODES)


def test_what_four_ranks_save_two_ranks_read_bit_for_bit_whatever_the_arrangement(saved):
    spawn(load_on, 2, str(saved))
    for rank in range(2):
        found = json.loads((saved / f"loaded-{rank}.json").read_text())
        assert {case: names for case, (names, _) in found.items() if names} == {}
        assert len(found) == NUM_CASES
        assert min(num_tensors for _, num_tensors in found.values()) > 10


def test_what_four_ranks_save_one_process_reads_bit_for_bit(saved):
    found = load_all(str(saved))
    assert {case: names for case, (names, _) in found.items() if names} == {}


def test_a_save_names_whole_tensors_and_nothing_of_the_plan(saved):
    for number, name, *_ in cases():
        model = MODELS[name]()
        index = FileSystemReader(latest_save(saved / str(number))).read_metadata()
        state = {f"model.{key}": tuple(value.shape) for key, value in model.named_parameters()}
        state |= {f"model.{key}": tuple(b.shape) for key, b in model.named_buffers() if f".{key}".endswith(SAVED)}
        stored = {key: tuple(value.size) for key, value in index.state_dict_metadata.items()}
        assert {key: shape for key, shape in stored.items() if key.startswith("model.")} == state
        assert not any("slices" in key for key in stored)


SAVED = (".running_mean", ".running_var", ".num_batches_tracked")


def test_no_element_is_written_twice_and_no_piece_is_larger_than_asked_for(saved):
    for number, *_, is_small in cases():
        index = FileSystemReader(latest_save(saved / str(number))).read_metadata()
        for name, stored in index.state_dict_metadata.items():
            assert sum(torch.Size(chunk.sizes).numel() for chunk in stored.chunks) == torch.Size(stored.size).numel()
            if is_small and name.startswith("model."):
                itemsize = stored.properties.dtype.itemsize
                limit = max(SMALL_PIECE_BYTES // itemsize, torch.Size(stored.size[1:]).numel())
                assert all(torch.Size(chunk.sizes).numel() <= limit for chunk in stored.chunks)


def test_loading_holds_no_more_than_a_piece_beside_what_it_fills(saved):
    number, name, kind, is_planned, _ = next(case for case in cases() if case[1] == "gpt-large" and case[4])
    model, optimizer = built(name, kind, seed=5, is_planned=is_planned, has_state=False)
    events = events_of(lambda: load(latest_save(saved / str(number)), model, optimizer))
    level = highest = 0
    for size in events:
        level += size
        highest = max(highest, level)
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    state_bytes = sum(value.numel() * value.element_size() for value in state)
    assert state_bytes > 400_000
    assert level <= state_bytes + SMALL_PIECE_BYTES
    assert highest <= state_bytes + 16 * SMALL_PIECE_BYTES  # random states alone are some kilobytes


def test_ranks_share_the_writing_of_what_all_of_them_have(saved):
    for number, *_ in cases():
        folder = latest_save(saved / str(number))
        sizes = [os.path.getsize(f"{folder}/__{rank}_0.distcp") for rank in range(4)]
        assert max(sizes) < 0.6 * sum(sizes), f"case {number}: {sizes}"
