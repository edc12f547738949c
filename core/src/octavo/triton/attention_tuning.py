"""How the attention kernels are cut for a device: the numbers that a platform overrides, and how they are fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DecodeCut:
    """How a decode launch is cut.

    block: context tokens of a tile. warps, stages: Triton's launch options. programs_per_unit: programs for each
    compute unit of the device; programs, if not 0, is their number instead. min_tiles: least tiles of a program, as
    putting shares together costs too.
    """

    block: int = 64
    warps: int = 4
    stages: int = 5
    programs_per_unit: int = 2
    programs: int = 0
    min_tiles: int = 2


@dataclass(frozen=True, kw_only=True)
class AttentionTuning:
    """Sizes of tiles and launches. The defaults run on any GPU of the last years; a platform brings measured ones.

    shared_memory: bytes that tiles of one program may take; larger tiles are cut until they fit.
    decode: the cut for many sequences. decode_few: (up to so many sequences, their cut), ascending: where a step's
    bound is that low, latency counts more than bandwidth.
    decode_rows: most query rows (tokens x heads of a group) per KV head in the decode kernel; fewer above head_dim 128.
    decode_fence: False promises that a barrier and one thread's release publish what the other threads of a program
    stored before, as memory models with cumulative release do; True is right everywhere and costs a little.
    prefill_rows, prefill_block: query rows and context tokens of a tile. prefill_warps, prefill_stages: launch options.
    prefill_programs_per_unit: programs of a prefill launch for each compute unit.
    """

    shared_memory: int = 96 * 1024
    decode: DecodeCut = DecodeCut()
    decode_few: tuple[tuple[int, DecodeCut], ...] = ()
    decode_rows: int = 64
    decode_fence: bool = True
    prefill_rows: int = 128
    prefill_block: int = 64
    prefill_warps: int = 8
    prefill_stages: int = 3
    prefill_programs_per_unit: int = 2


def decode_tiles(stages: int) -> int:
    """Tiles on their way in the decode kernel: the block table's own loads take every second stage."""
    return max(1, (stages - 1) // 2)


def prefill_tiles(stages: int) -> int:
    """Tiles on their way in the prefill kernel."""
    return max(1, stages - 1)


def fit(block: int, stages: int, tiles: Callable[[int], int], *, token_bytes: int, memory: int) -> tuple[int, int]:
    """(block, stages) cut until the tiles on their way fit into `memory` bytes: stages go first.

    tiles: how many there are with so many stages. token_bytes: key and value of one token. A block stays at least 16,
    what a matrix unit takes.
    """
    while block * token_bytes * tiles(stages) > memory:
        if stages > 3:
            stages -= 2
        elif block > 16:
            block //= 2
        else:
            break
    return block, stages


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
