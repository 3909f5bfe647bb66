"""Two ranks that save after every step are killed at random moments around a save: the last committed one loads, whole.

Processes come from a server that has imported torch already, so that twenty trials cost some seconds.
"""

import os
import random
import time

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from osdp_ray.execution import save_tensors
from osdp_ray.execution.save_writing import SaveWriter
from osdp_ray.execution.saves import Save, latest_save, list_saves, load, read_save
from osdp_ray.modeling.splitting import split_operator
from tests.ranks import context

NUM_TRIALS, FOREVER = 20, 10**6


class ObjectStore(LocalFileSystem):
    """Like a store of objects: nothing is renamed, and folders come and go with what is in them."""

    protocol = "objects"

    def __init__(self, **settings):
        super().__init__(auto_mkdir=True, **settings)

    def mv(self, *arguments, **settings):
        raise NotImplementedError("objects have no other names")

    mv_file = rename = move = mv

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("objects://"))


def register():
    fsspec.register_implementation("objects", ObjectStore, clobber=True)


def build(*, sharded):
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96), nn.Linear(96, 30))
    split_operator(model, "1", 2)
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for module in model.modules():  # as fully_shard does it, which takes a second to import
            for name, parameter in module.named_parameters(recurse=False):
                shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(shard))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def all_tensors(model, optimizer):
    yield from (parameter.detach() for parameter in model.parameters())
    yield from (value for state in optimizer.state.values() for value in state.values())


def train(rank, store, place, in_background, told):
    """Every tensor holds the number of the step; each save is told of as it begins."""
    torch.set_num_threads(1)
    register()
    save_tensors.MAX_PIECE_BYTES = 4096  # many pieces: more moments to be killed between
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, optimizer = build(sharded=True)
    writer = SaveWriter(place, keep=2, in_background=in_background)
    for step in range(1, FOREVER):
        for tensor in all_tensors(model, optimizer):
            tensor.fill_(step)
        if rank == 0:
            told.send((step, time.monotonic()))
        writer.start(Save(step=step), model, optimizer, None)
        for outcome in writer.outcomes():
            if outcome.error is not None:
                raise outcome.error


def killed(processes, told, rng, num_steps):
    """Kills both ranks at a random moment of the save after `num_steps`; the step that was being saved."""
    starts = {}
    while len(starts) <= num_steps:
        assert told.poll(60), "the ranks do not save"
        step, now_s = told.recv()
        starts[step] = now_s
    seconds = (starts[num_steps + 1] - starts[1]) / num_steps
    time.sleep(rng.random() * 1.5 * seconds)
    for process in rng.sample(processes, 2):
        process.kill()
        time.sleep(rng.choice((0.0, 0.2 * seconds)))
    for process in processes:
        process.join()
    while told.poll():
        starts.update([told.recv()])
    return max(starts)


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("scheme", ["", "objects://"], ids=["by rename", "by the last object"])
def test_after_a_kill_at_any_moment_the_last_committed_save_loads(tmp_path, scheme, in_background):
    register()
    rng = random.Random(f"{scheme} {in_background}")
    unfinished = 0
    for trial in range(NUM_TRIALS // 4):
        place = f"{scheme}{tmp_path}/{trial}"
        told, tell = context.Pipe(duplex=False)
        processes = [
            context.Process(target=train, args=(rank, f"{tmp_path}/store-{trial}", place, in_background, tell))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        last = killed(processes, told, rng, num_steps=3)

        newest = read_save(latest_save(place)).step
        assert last - (2 if in_background else 1) <= newest <= last
        for save in list_saves(place):
            model, optimizer = build(sharded=False)
            step = load(save, model, optimizer).step
            assert {value for tensor in all_tensors(model, optimizer) for value in tensor.unique().tolist()} == {step}
        unfinished += len(os.listdir(f"{tmp_path}/{trial}/saves")) > len(list_saves(place))
    assert unfinished > 0, "no kill met a save that was being written"
