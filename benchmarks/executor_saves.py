"""Seconds per save and per load of a sharded model with AdamW's state, against plain torch.distributed.checkpoint.

`python benchmarks/executor_saves.py`: gloo ranks hold a GPT sharded by FSDP2 per block. In turns, in one run: our save
(planned, written, checked, committed) and torch's recipe (`get_state_dict`, `dcp.save` with files flushed to the disk);
the same for loading; and for how long each keeps training waiting where it writes in the background.
`compare_saves(num_ranks=..., ...)` gives the figures to other benchmarks.
"""

import json
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from harness import machine, parse_flags, spread, write_figures
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from osdp_ray.execution.save_writing import SaveWriter
from osdp_ray.execution.saves import Save, load, save
from osdp_ray.schema import format_table
from osdp_ray.units import format_bytes
from osdp_ray.workloads.gpt import GPT

ACTIONS = ("save", "load", "stall")


def main() -> None:
    flags = parse_flags(__doc__ or "")
    size = {"layers": 4, "hidden": 256}
    worlds = (2,) if flags.quick else (2, 4)
    num_rounds = 3 if flags.quick else 7
    figures = {f"{num}_ranks": compare_saves(num_ranks=num, num_rounds=num_rounds, **size) for num in worlds}
    rows = []
    for world, found in figures.items():
        for action in ACTIONS:
            ours, plain = spread(found[f"{action}_s"]), spread(found[f"plain_{action}_s"])
            rows.append((world, action, ours, plain, f"{found[f'{action}_ratio']:.2f}"))
    print(format_table(("ranks", "what", "ours, s: median (min to max)", "plain", "ratio"), rows))
    print(f"\n{format_bytes(figures['2_ranks']['state_bytes'])} of parameters and optimizer state; {machine()}")
    write_figures(flags.json, figures)


def compare_saves(
    *, num_ranks: int, layers: int, hidden: int, num_rounds: int = 5, folder: str | None = None
) -> dict[str, Any]:
    """Seconds of every round, ours and plain (`plain_`), of a save, a load, and the stall of one in the background;
    ratios are of the medians, ours over plain. `folder` is where they are written; default: a temporary one."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(dir=folder) as place:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        mp.spawn(_measure, (num_ranks, port, place, layers, hidden, num_rounds), nprocs=num_ranks)
        found = json.loads(Path(place, "figures.json").read_text())
    for action in ACTIONS:
        ours, plain = (statistics.median(found[f"{prefix}{action}_s"]) for prefix in ("", "plain_"))
        found[f"{action}_ratio"] = ours / plain
    return found


def _measure(rank: int, num_ranks: int, port: int, place: str, layers: int, hidden: int, num_rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    model, optimizer = _build(num_ranks, layers, hidden)
    ours = SaveWriter(f"{place}/background", keep=1, in_background=True)
    seconds: dict[str, list[float]] = {f"{prefix}{action}_s": [] for action in ACTIONS for prefix in ("", "plain_")}
    for number in range(num_rounds + 1):
        path, plain = f"{place}/ours-{number}", f"{place}/plain-{number}"
        timed = {
            "save_s": lambda path=path: save(path, Save(step=1), model, optimizer),
            "plain_save_s": lambda plain=plain: _plain_save(plain, model, optimizer),
            "load_s": lambda path=path: load(f"{path}/saves/step-00000001", model, optimizer),
            "plain_load_s": lambda plain=plain: _plain_load(plain, model, optimizer),
        }
        for name, action in timed.items():
            seconds[name].append(_seconds(action))
        facts = Save(step=number + 1)
        seconds["stall_s"].append(_seconds(lambda facts=facts: ours.start(facts, model, optimizer, None)))
        ours.wait()
        plain_background = _Background(place, model, optimizer)
        seconds["plain_stall_s"].append(_seconds(plain_background.start))
        plain_background.future.result()
        dist.barrier()
        if rank == 0:
            for old in (path, plain):
                shutil.rmtree(old)
    if rank == 0:
        tensors = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        found: dict[str, Any] = {name: values[1:] for name, values in seconds.items()}  # the first one warms up
        found["state_bytes"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        Path(place, "figures.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _build(num_ranks: int, layers: int, hidden: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = GPT(layers=layers, hidden=hidden, heads=4, sequence=128, vocabulary=8000)
    mesh = init_device_mesh("cpu", (num_ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _seconds(action: Callable[[], Any]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start_s = time.perf_counter()
    action()
    slowest = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _plain_save(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=path)


def _plain_load(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters, state = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)


class _Background:
    """torch's save in the background."""

    def __init__(self, place: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._place, self._model, self._optimizer = place, model, optimizer
        self.future: Any = None

    def start(self) -> None:
        parameters, state = get_state_dict(self._model, self._optimizer)
        tensors = {"model": parameters, "optimizer": state}
        self.future = dcp.async_save(tensors, checkpoint_id=f"{self._place}/plain-background")


if __name__ == "__main__":
    main()
