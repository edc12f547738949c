"""Bookkeeping ops: what a step needs before the model runs. They read the device-resident request table.

R rows of the table, T tokens, S sequences, M blocks a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.ops.catalogue import OpDef, define


def gather_tokens(tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Input ids [T]: tokens [R, L] at (rows [T], positions [T]), both int64."""
    return tokens[rows, positions]


def slot_mapping(block_table: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """KV slots int64 [T]: where the key and value of position p of row r go.

    block_table int32 [R, M]; slot = block_table[r, p // block_size] * block_size + p % block_size.
    """
    block = block_table[rows, positions // block_size].to(torch.int64)
    return block * block_size + positions % block_size


def _tables(dtype: str) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for num_rows, length, num_tokens in ((1, 16, 1), (5, 64, 33), (3, 32, 0)):
        table = torch.randint(0, 1000, (num_rows, length), generator=generator, dtype=torch.int32)
        rows = torch.randint(0, num_rows, (num_tokens,), generator=generator)
        yield table, rows, torch.randint(0, length, (num_tokens,), generator=generator)


def _slot_inputs(dtype: str) -> Iterable[tuple[object, ...]]:
    for table, rows, positions in _tables(dtype):
        yield table, rows, positions, 16


EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}

define(OpDef(name="gather_tokens", reference=gather_tokens, samples=_tables, tolerance=EXACT))
define(OpDef(name="slot_mapping", reference=slot_mapping, samples=_slot_inputs, tolerance=EXACT))
