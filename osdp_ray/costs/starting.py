"""What a rank holds before its first step: while its model is built, and while a save is loaded into it.

building   shards that are filled one by one, buffers, and what is drawn beside a shard: the chunk that it shares
           with other ranks, or the whole tensor where the constructor does not treat all elements alike
loading    shards, buffers, the optimizer's state, and one piece of the save, which a GPU's rank reads on the host
"""

import math
from collections.abc import Iterator

from osdp_ray.costs.memory import StepSimulator
from osdp_ray.costs.splitting import splits_of
from osdp_ray.costs.units import GRANULE_BYTES, round_up
from osdp_ray.records.plan import parse_slice
from osdp_ray.records.profile import Parameter
from osdp_ray.units import MIB

BUILDING, LOADING = "building", "loading"  # names of phases, beside those of a step
CHUNK_NUMEL = 1 << 18  # drawn with one seed
SAVE_PIECE_BYTES = 64 * MIB  # the most that a save writes, and reads, as one piece
_RANDOM_STATE_BYTES = 5056  # torch's random state on the CPU, kept while values are drawn


def chunk_rows(shape: tuple[int, ...]) -> int:
    """How many rows of a tensor, along its first dimension, are drawn with one seed."""
    return max(1, CHUNK_NUMEL // max(1, math.prod(shape[1:])))


def starting_bytes(simulator: StepSimulator, state_bytes: int, rank: int = 0) -> dict[str, int]:
    """The peaks of a rank before its first step, by the names of the phases; `state_bytes` are its optimizer's."""
    return {phase: sum(shares.values()) for phase, shares in starting_shares(simulator, state_bytes, rank).items()}


def starting_shares(simulator: StepSimulator, state_bytes: int, rank: int = 0) -> dict[str, dict[str, int]]:
    """What those peaks consist of, by kind. The save is one of the same plan and number of ranks."""
    profile = simulator.profile
    granule = GRANULE_BYTES[profile.device_kind]
    on_host = profile.device_kind == "cpu"
    shards = piece = 0
    drawn = profile.buffer_scratch_bytes
    for parameter, group_size, times, num_slices in _parameters(simulator):
        index = rank % group_size
        local_bytes = parameter.local_bytes(group_size, index)
        shards += times * round_up(local_bytes, granule)
        if num_slices > 1 and len(parameter.shape) == 2:
            drawn = max(drawn, _slice_scratch_bytes(parameter, group_size, index, num_slices))
        else:
            drawn = max(drawn, _scratch_bytes(parameter, group_size, index))
        piece = max(piece, _piece_bytes(parameter, local_bytes))
    held = {
        "shards of parameters": shards,
        "buffers": profile.buffer_bytes,
        "random state": _RANDOM_STATE_BYTES if on_host else 0,
    }
    return {
        BUILDING: held | {"values beside a shard": round_up(drawn, granule)},
        LOADING: held | {"optimizer state": state_bytes, "a piece of the save": piece if on_host else 0},
    }


def _piece_bytes(parameter: Parameter, local_bytes: int) -> int:
    """The largest piece of a shard in a save: whole rows."""
    row_bytes = parameter.num_bytes // parameter.shape[0]
    return min(local_bytes, max(1, SAVE_PIECE_BYTES // row_bytes) * row_bytes)


def _parameters(simulator: StepSimulator) -> Iterator[tuple[Parameter, int, int, int]]:
    """Every parameter with the number of ranks that share it, how often it is there, and of how many slices it is."""
    profile = simulator.profile
    played = zip(simulator.sections, simulator.class_indices, simulator.units, simulator.times, strict=True)
    for section, class_index, units, times in played:
        splits = splits_of(profile.classes[class_index], section.units)
        section_class = simulator.table.split_class(class_index, splits).section_class
        operators = {operator.name: operator for operator in section_class.operators}
        for planned, unit in zip(section.units, units, strict=True):
            for name in planned.operators:
                num_slices = parse_slice(name)[2]
                for index in operators[name].parameters:
                    yield section_class.parameters[index], unit.sizes.group_size, times, num_slices


def _slice_scratch_bytes(parameter: Parameter, group_size: int, index: int, num_slices: int) -> int:
    """The same of a slice, whose values are columns of chunks of the whole."""
    if not parameter.local_bytes(group_size, index) or parameter.scratch_bytes:
        return parameter.scratch_bytes if parameter.local_bytes(group_size, index) else 0
    num_rows, columns = parameter.shape[0], parameter.shape[1] * num_slices
    rows = chunk_rows((num_rows, columns))
    share = -(-num_rows // group_size)
    first, last = index * share, min(num_rows, (index + 1) * share)
    chunks = range(first // rows, -(-last // rows))
    return max(min((n + 1) * rows, num_rows) - n * rows for n in chunks) * columns * parameter.itemsize_bytes


def _scratch_bytes(parameter: Parameter, group_size: int, index: int) -> int:
    """What is held beside one rank's shard while its values are drawn."""
    if not parameter.local_bytes(group_size, index):
        return 0
    if parameter.scratch_bytes:
        return parameter.scratch_bytes
    rows = chunk_rows(parameter.shape)
    whole = parameter.shape[0]
    share = -(-whole // group_size)
    first, last = index * share, min(whole, (index + 1) * share)
    begin, end = last // rows * rows, min(whole, (last // rows + 1) * rows)  # the chunk at its end, and at its start
    shared = [(end - begin) if begin < last < end else 0]
    begin, end = first // rows * rows, min(whole, (first // rows + 1) * rows)
    shared.append((end - begin) if begin < first else 0)
    return max(shared) * (parameter.num_bytes // whole)
