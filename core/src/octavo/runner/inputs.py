"""The device-resident request table, the inputs of one step, and the host memory through which both are fed.

The table holds every row's tokens and block tables; a step uploads what changed (new requests, new block ids) and three
numbers for each of its sequences. Everything else is read from the table on the device, by `begin_step`, so a token
sampled by the last step feeds the next one without passing through the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.plugin.contracts import AttnBatch, BatchKey, Device
from octavo.plugin.specs import BatchLimits
from octavo.plugin.step import Admit, Batch, BlockUpdate, KVGroup
from octavo.plugin.torch import HOST
from octavo.runner.buckets import round_up

MAX_STOPS = 16
"""Stop tokens of a row that the device knows. Further ones are the host's, which learns of each token a step late."""
FOREVER = np.iinfo(np.int32).max
UPLOAD_BYTES = 1 << 16
UPDATED_AT_ONCE = 256
"""Entries of block tables that a platform with static shapes is sent at once."""
ALIGNMENT = 16


class Staging:
    """Pinned host memory of one step: what it sends lies here until it is collected, and what comes back arrives here.

    tokens: int64 [max_tokens].
    """

    def __init__(self, device: Device, max_tokens: int) -> None:
        self._device = device
        self._target = device.torch_device
        self._take(UPLOAD_BYTES)
        self._outgrown: list[Tensor] = []
        self.tokens = device.pin(torch.empty(max_tokens, dtype=torch.int64))

    def _take(self, size: int) -> None:
        self._memory = self._device.pin(torch.empty(size, dtype=torch.uint8))
        self._bytes = self._memory.numpy()
        self._size, self._used = size, 0

    def reset(self) -> None:
        """Everything sent has arrived: use the memory again."""
        self._used = 0
        self._outgrown.clear()

    def _room(self, num_bytes: int) -> slice:
        """The next free part of the memory, which is another one if it did not fit."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        end = start + num_bytes
        if end > self._size:
            self._outgrown.append(self._memory)
            self._take(max(end, 2 * self._size))
            start, end = 0, num_bytes
        self._used = end
        return slice(start, end)

    def stage(self, array: NDArray[Any]) -> Tensor:
        """A pinned copy, valid until `reset`: the host need not wait while it is sent."""
        room = self._room(array.nbytes)
        staged = self._bytes[room].view(array.dtype).reshape(array.shape)
        staged[...] = array
        return torch.from_numpy(staged)

    def send(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, without waiting; valid until `reset` where device and host share memory."""
        return self.stage(array).to(self._target, non_blocking=True)

    def receive(self, t: Tensor) -> Tensor:
        """The tensor on the host, without waiting: it holds its numbers once an event behind this has happened, and
        until `reset`. As it is where it lies there already."""
        if t.device.type == HOST:
            return t
        room = self._room(t.numel() * t.element_size())
        return self._memory[room].view(t.dtype).view(t.shape).copy_(t, non_blocking=True)


class RequestTable:
    """R rows and one row for padding, whose blocks are all the null block.

    tokens int32 [R + 1, max_model_len + 1]; blocks int32 [R + 1, C]: the block tables of all KV groups side by side,
    `groups` int32 [G, 2] says where (see `octavo.ops.bookkeeping`); `columns` and `block_sizes` say it on the host.
    ended int32 [R + 1], limits int32 [R + 1, 2], stops int32 [R + 1, MAX_STOPS]: where answers end (`commit_tokens`).
    static: write in shapes that do not depend on what is written, as each shape is a program of its own to compile.
    """

    def __init__(self, limits: BatchLimits, groups: Sequence[KVGroup], device: Device, *, static: bool = False) -> None:
        self._static = static
        self.padding_row = limits.max_num_seqs
        self.max_model_len = limits.max_model_len
        self.device = device.torch_device
        num_rows = limits.max_num_seqs + 1
        widths = [-(-limits.max_model_len // g.block_size) + 1 for g in groups]
        bounds = list(itertools.accumulate(widths, initial=0))
        self.block_sizes = [group.block_size for group in groups]
        self.columns = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        places = list(zip(bounds, self.block_sizes, strict=False))
        self.groups = torch.tensor(places, dtype=torch.int32, device=self.device).view(len(groups), 2)
        self.tokens = self._zeros(num_rows, limits.max_model_len + 1)
        self.blocks = self._zeros(num_rows, bounds[-1])
        self.ended = self._zeros(num_rows)
        self.limits = self._zeros(num_rows, 2)
        self.limits[:, 1] = FOREVER
        self.stops = self._zeros(num_rows, MAX_STOPS) - 1

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def admit(self, admits: Sequence[Admit], staging: Staging) -> None:
        """Write the known tokens of new rows, and where their answers end."""
        if not admits:
            return
        ends = np.full((len(admits), 2 + MAX_STOPS), -1, np.int32)
        for admit, end in zip(admits, ends, strict=True):
            self._write_tokens(admit, staging)
            end[0] = admit.num_prompt_tokens + admit.params.min_tokens
            end[1] = self.max_model_len if admit.limit is None else admit.limit
            stops = admit.stop_ids[:MAX_STOPS]
            end[2 : 2 + len(stops)] = stops
        rows, values = staging.send(np.array([a.row for a in admits], np.int64)), staging.send(ends)
        self.ended.index_fill_(0, rows, 0)
        self.limits[rows] = values[:, :2]
        self.stops[rows] = values[:, 2:]

    def _write_tokens(self, admit: Admit, staging: Staging) -> None:
        ids = admit.token_ids.astype(np.int32, copy=False)
        if not self._static:
            known = staging.stage(ids)
            self.tokens[admit.row, : len(known)].copy_(known, non_blocking=True)
            return
        whole = np.zeros((1, self.tokens.shape[1]), np.int32)
        whole[0, : len(ids)] = ids
        self.tokens[staging.send(np.array([admit.row], np.int64))] = staging.send(whole)

    def write_drafts(self, batch: Batch, staging: Staging) -> None:
        """Write drafts behind the tokens that are known: steps read them as they read those."""
        assert batch.drafts is not None, "the batch has no drafts"
        given = batch.drafts >= 0
        seqs, column = given.nonzero()
        positions = (batch.starts + batch.counts - given.sum(axis=1))[seqs] + column
        self.write(batch.rows[seqs], positions, staging.send(batch.drafts[given]), staging)

    def write(self, rows: NDArray[Any], positions: NDArray[Any], ids: Tensor, staging: Staging) -> None:
        """Set tokens [N] at different places."""
        places = rows.astype(np.int64) * self.tokens.shape[1] + positions
        self.tokens.view(-1)[staging.send(places)] = ids.to(self.tokens.dtype)

    def update(self, updates: Sequence[BlockUpdate], staging: Staging) -> None:
        """Write new block ids, one update per KV group."""
        width = self.blocks.shape[1]
        parts = [
            (u.rows.astype(np.int64) * width + columns.start + u.indices, u.blocks)
            for columns, u in zip(self.columns, updates, strict=False)
            if len(u.rows)
        ]
        if not parts:
            return
        places, blocks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if not self._static:
            self.blocks.view(-1)[staging.send(places)] = staging.send(blocks)
            return
        # The last entry fills the rest: writing it again changes nothing.
        padded = np.arange(round_up(len(places), UPDATED_AT_ONCE)).clip(max=len(places) - 1)
        for chosen in padded.reshape(-1, UPDATED_AT_ONCE):
            self.blocks.view(-1)[staging.send(places[chosen])] = staging.send(blocks[chosen])


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """What the host knows of a step. key: its padded shape, T tokens and S sequences.

    q_starts int32 [S + 1], kv_lens int32 [S]: padded.
    """

    key: BatchKey
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    q_starts: NDArray[np.int32]
    kv_lens: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """A step's inputs on the device, cut to its shape: see `begin_step`. block_tables: one for each KV group."""

    seqs: Tensor
    q_starts: Tensor
    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    picks: Tensor
    block_tables: Sequence[Tensor]

    def attention(self, host: HostStep) -> list[AttnBatch]:
        """What attention must know, for each KV group."""
        return [
            AttnBatch(
                num_tokens=host.key.num_tokens,
                num_seqs=host.key.num_seqs,
                num_decodes=host.num_decodes,
                max_q_len=host.max_q_len,
                max_kv_len=host.max_kv_len,
                q_starts=self.q_starts,
                kv_lens=self.seqs[1],
                block_table=table,
                slots=slots,
                q_starts_host=host.q_starts,
                kv_lens_host=host.kv_lens,
            )
            for slots, table in zip(self.slots, self.block_tables, strict=True)
        ]


class InputBuffers:
    """Device memory for `DeviceStep`, taken once: addresses never change, as capture needs."""

    def __init__(self, max_tokens: int, max_seqs: int, table: RequestTable, device: Device) -> None:
        self._table = table
        target = device.torch_device
        # One int32 tensor, so that a step is one upload: q_starts [S + 1], then three numbers of each sequence. Each of
        # them begins aligned, as kernels are compiled apart for data that is not.
        self._width = round_up(max_seqs + 1, ALIGNMENT // 4)
        self._uploaded = torch.zeros((4, self._width), dtype=torch.int32, device=target)
        self._q_starts, self._seqs = self._uploaded[0], self._uploaded[1:]
        num_groups = len(table.groups)
        self._ids = torch.zeros(max_tokens, dtype=torch.int32, device=target)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=target)
        self._slots = torch.zeros((num_groups, max_tokens), dtype=torch.int64, device=target)
        self._block_table = torch.zeros((max_seqs, table.blocks.shape[1]), dtype=torch.int32, device=target)
        self._picks = torch.zeros((3, max_seqs), dtype=torch.int64, device=target)

    def send(self, batch: Batch, key: BatchKey, staging: Staging) -> HostStep:
        """Upload a step's sequences, padded to the key's shape."""
        num_seqs, counts = batch.num_seqs, batch.counts
        kv_lens = batch.starts + counts
        packed = np.zeros((4, self._width), np.int32)
        q_starts, seqs = packed[0], packed[1:]
        np.cumsum(counts, out=q_starts[1 : num_seqs + 1])
        q_starts[num_seqs + 1 : key.num_seqs + 1] = q_starts[num_seqs]
        seqs[0, :num_seqs] = batch.rows
        seqs[0, num_seqs : key.num_seqs] = self._table.padding_row
        seqs[1, :num_seqs] = kv_lens
        if batch.drafts is None:  # else there is more than one token to choose for a sequence: see `Places`
            seqs[2, :num_seqs] = batch.samples
        self._uploaded.copy_(staging.stage(packed), non_blocking=True)
        max_q_len = 1 if key.max_q_len == 1 else int(counts.max())
        return HostStep(
            key=key,
            num_decodes=num_seqs if max_q_len == 1 else int(np.argmax(counts != 1)),
            max_q_len=max_q_len,
            max_kv_len=int(kv_lens.max()),
            q_starts=q_starts[: key.num_seqs + 1],
            kv_lens=seqs[1, : key.num_seqs],
        )

    def views(self, key: BatchKey, max_context: int) -> DeviceStep:
        """The buffers cut to a shape; block tables to `max_context` positions (0: all)."""
        num_tokens, num_seqs = key.num_tokens, key.num_seqs
        block_table = self._block_table[:num_seqs]
        tables = [block_table[:, columns] for columns in self._table.columns]
        if max_context:
            sizes = self._table.block_sizes
            tables = [table[:, : -(-max_context // size)] for table, size in zip(tables, sizes, strict=True)]
        return DeviceStep(
            seqs=self._seqs[:, :num_seqs],
            q_starts=self._q_starts[: num_seqs + 1],
            ids=self._ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slots=self._slots[:, :num_tokens],
            block_table=block_table,
            picks=self._picks[:, :num_seqs],
            block_tables=tables,
        )
