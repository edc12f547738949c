"""The device-resident request table and the inputs of one step.

The table holds every row's tokens and block tables; a step uploads what changed (new requests, new block ids) and a few
small index arrays. Input ids and KV slots are read from the table on the device, so a token sampled by the last step
feeds the next one without passing through the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.plugin.contracts import AttnBatch, BatchKey, Device
from octavo.plugin.specs import BatchLimits
from octavo.plugin.step import Admit, Batch, BlockUpdate, KVGroup

NUM_HOST_BUFFERS = 3
"""A host buffer may still be on its way to the device while the next step (run-ahead) is being filled."""


class RequestTable:
    """R rows and one scratch row for padding, whose blocks are all the null block.

    tokens int32 [R + 1, max_model_len + 1]; blocks: per KV group int32 [R + 1, max blocks of a sequence].
    """

    def __init__(self, limits: BatchLimits, groups: Sequence[KVGroup], device: Device) -> None:
        self.scratch = limits.max_num_seqs
        self.device = device.torch_device
        num_rows = limits.max_num_seqs + 1
        self.tokens = torch.zeros((num_rows, limits.max_model_len + 1), dtype=torch.int32, device=self.device)
        self.blocks = [
            torch.zeros((num_rows, -(-limits.max_model_len // g.block_size) + 1), dtype=torch.int32, device=self.device)
            for g in groups
        ]

    def admit(self, admits: Sequence[Admit]) -> None:
        """Write the known tokens of new rows."""
        for admit in admits:
            known = torch.from_numpy(np.array(admit.token_ids, np.int32))  # a copy: ids from a message are read-only
            self.tokens[admit.row, : len(known)] = known.to(self.device, non_blocking=True)

    def update(self, updates: Sequence[BlockUpdate]) -> None:
        """Write new block ids, one update per KV group."""
        for table, update in zip(self.blocks, updates, strict=False):
            if len(update.rows):
                rows, indices, blocks = (
                    torch.from_numpy(a).to(self.device, non_blocking=True)
                    for a in (update.rows.astype(np.int64), update.indices.astype(np.int64), update.blocks)
                )
                table.index_put_((rows, indices), blocks)


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Index tensors of one step, padded to `key`. T, S, N of the key: tokens, sequences, sampled positions.

    token_rows, positions int64 [T]: table row and position of each token (padding: the scratch row, 0).
    rows int64 [S]; q_starts int32 [S + 1]; kv_lens int32 [S].
    sample_at int64 [N]: index of the token whose logits are sampled; sample_rows, sample_positions int64 [N]: row and
    position of the new token (padding: scratch row). num_samples: how many of N are real.
    """

    key: BatchKey
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    num_samples: int
    token_rows: Tensor
    positions: Tensor
    rows: Tensor
    sample_at: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    q_starts: Tensor
    kv_lens: Tensor
    q_starts_host: NDArray[np.int32]
    kv_lens_host: NDArray[np.int32]
    sampled_rows_host: NDArray[np.int32]
    sampled_positions_host: NDArray[np.int64]

    def attention(self, slots: Tensor, block_table: Tensor) -> AttnBatch:
        """What one KV group's attention needs: the shared indices with the group's slots and block table."""
        return AttnBatch(
            num_tokens=self.key.num_tokens,
            num_seqs=self.key.num_seqs,
            num_decodes=self.num_decodes,
            max_q_len=self.max_q_len,
            max_kv_len=self.max_kv_len,
            q_starts=self.q_starts,
            kv_lens=self.kv_lens,
            block_table=block_table,
            slots=slots,
            q_starts_host=self.q_starts_host,
            kv_lens_host=self.kv_lens_host,
        )


class InputBuffers:
    """Host and device memory for `StepInputs`, taken once: device addresses never change, as capture needs.

    pad_samples: also pad the sampled positions (to the key's sequences), where shapes are static.
    """

    def __init__(self, max_tokens: int, max_seqs: int, device: Device, *, scratch_row: int, pad_samples: bool) -> None:
        self.scratch_row = scratch_row
        self.pad_samples = pad_samples
        sizes64 = {
            "token_rows": max_tokens,
            "positions": max_tokens,
            "rows": max_seqs,
            "sample_at": max_seqs,
            "sample_rows": max_seqs,
            "sample_positions": max_seqs,
        }
        sizes32 = {"q_starts": max_seqs + 1, "kv_lens": max_seqs}
        self._blocks = [_Block(sizes64, torch.int64, device), _Block(sizes32, torch.int32, device)]

    def fill(self, batch: Batch, key: BatchKey) -> StepInputs:
        """Write a step's indices and send them to the device: one copy per integer width."""
        (host64, views64, send64), (host32, views32, send32) = (block.next() for block in self._blocks)
        num_seqs, counts = batch.num_seqs, batch.counts
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        seq_of_token = np.repeat(np.arange(num_seqs), counts)
        offsets = np.arange(num_tokens) - (ends - counts)[seq_of_token]
        _put(host64["token_rows"], batch.rows[seq_of_token], key.num_tokens, self.scratch_row)
        _put(host64["positions"], batch.starts[seq_of_token] + offsets, key.num_tokens, 0)
        _put(host64["rows"], batch.rows, key.num_seqs, self.scratch_row)
        host32["q_starts"][0] = 0
        _put(host32["q_starts"][1:], ends, key.num_seqs, num_tokens)
        _put(host32["kv_lens"], batch.starts + counts, key.num_seqs, 0)
        sampled = np.flatnonzero(batch.samples)
        rows, positions = batch.rows[sampled], (batch.starts + counts)[sampled].astype(np.int64)
        width = key.num_seqs if self.pad_samples else len(sampled)
        _put(host64["sample_at"], ends[sampled] - 1, width, 0)
        _put(host64["sample_rows"], rows, width, self.scratch_row)
        _put(host64["sample_positions"], positions, width, 0)
        send64()
        send32()
        lengths = {"token_rows": key.num_tokens, "positions": key.num_tokens, "rows": key.num_seqs}
        lengths |= {"q_starts": key.num_seqs + 1, "kv_lens": key.num_seqs}
        tensors = {name: view[: lengths.get(name, width)] for name, view in (views64 | views32).items()}
        return StepInputs(
            key=key,
            num_decodes=int(np.argmax(counts != 1)) if (counts != 1).any() else num_seqs,
            max_q_len=int(counts.max()),
            max_kv_len=int((batch.starts + counts).max()),
            num_samples=len(sampled),
            q_starts_host=host32["q_starts"][: key.num_seqs + 1].copy(),
            kv_lens_host=host32["kv_lens"][: key.num_seqs].copy(),
            sampled_rows_host=rows,
            sampled_positions_host=positions,
            **tensors,
        )


class _Block:
    """Named sections of one device tensor, fed from a ring of pinned host copies."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype, device: Device) -> None:
        total = sum(sizes.values())
        bounds = dict(zip(sizes, itertools.pairwise(itertools.accumulate(sizes.values(), initial=0)), strict=True))
        self.device = torch.zeros(total, dtype=dtype, device=device.torch_device)
        self.views = {name: self.device[a:b] for name, (a, b) in bounds.items()}
        hosts = [device.pin(torch.zeros(total, dtype=dtype)) for _ in range(NUM_HOST_BUFFERS)]
        self.ring = itertools.cycle([(h, {name: h.numpy()[a:b] for name, (a, b) in bounds.items()}) for h in hosts])

    def next(self) -> tuple[dict[str, NDArray[Any]], dict[str, Tensor], Callable[[], object]]:
        """(host sections to write, device views, a function that sends them)."""
        host, sections = next(self.ring)
        return sections, self.views, lambda: self.device.copy_(host, non_blocking=True)


def _put(section: NDArray[Any], values: NDArray[Any], length: int, padding: int) -> None:
    section[: len(values)] = values
    section[len(values) : length] = padding
