"""What a step's attention is made of, worked out once for all layers, in numpy.

    rows    sequences with few new tokens (decodes, checked drafts), batched: equal query lengths and similar context
            lengths go into one bucket, whose blocks are gathered side by side and padded to its longest context
    pieces  up to PIECE new tokens of one prompt, against the part of its context that they see

Knows nothing of layers: blocks and tokens are picked here, keys and queries are read in `attention.py`.

Shapes: T tokens, n rows of a bucket, t new tokens of each, L context length (padded), H kv heads, G query heads per
kv head, D head_dim, B blocks, N tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.plugin import AttentionSpec, AttnBatch

Ints = NDArray[np.int64]
Pick = slice | torch.Tensor
"""Which rows of a first dimension: a slice where they are consecutive (nothing is copied), else int64 indices."""

FEW = 8
"""Sequences with up to that many new tokens are batched as rows."""

PIECE = 256
"""Most query tokens of a piece that needs a mask: bounds the mask, and skips keys that none of them sees."""

BUCKET_BYTES = 8 << 20
"""Most keys and values gathered at once: they are read again right away, so they should still be in the cache."""

SLACK_BYTES = 128 << 10
"""Padding that costs about as much as the calls of one more bucket (measured: 25 us against 0.2 us for 768 bytes)."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Keys and values of some sequences, padded to one length: blocks of the cache and how to look at them.

    gathered: where they are copied to (keys, values), as blocks [n * L / N, N, H, D] and viewed as [n, H, L, D]. None:
    the blocks are consecutive and are viewed in the cache.
    """

    blocks: Pick
    num_rows: int
    length: int
    gathered: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None

    def read(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one layer's caches [B, N, H, D]."""
        if self.gathered is None or isinstance(self.blocks, slice):
            return self.view(keys[self.blocks]), self.view(values[self.blocks])
        block_k, block_v, context_k, context_v = self.gathered
        torch.index_select(keys, 0, self.blocks, out=block_k)
        torch.index_select(values, 0, self.blocks, out=block_v)
        return context_k, context_v

    def view(self, blocks: torch.Tensor) -> torch.Tensor:
        """[n * L / N, N, H, D] as [n, H, L, D]."""
        return blocks.view(self.num_rows, -1, *blocks.shape[2:])[:, : self.length].transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A bucket. tokens: its n * t tokens in the packed batch. context: its keys and values, [n, H, L, D].
    mask [n, 1, t * G or 1, L]."""

    num_rows: int
    num_new: int
    tokens: Pick
    context: Context
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Query tokens of one prompt. keys: a range of this step's own keys and values, or a context [1, H, L, D].

    mask [t, L]; None is plain causal (or all, if the spec is not causal).
    """

    tokens: slice
    keys: slice | Context
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The step's work for every layer. slots int64 [T]. num_used: tokens that belong to a sequence."""

    slots: torch.Tensor
    num_used: int
    rows: tuple[Rows, ...]
    pieces: tuple[Piece, ...]


class Planner:
    """Plans the steps of all layers with one spec; keeps their gather buffers."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.by_hand = spec.softcap is not None or spec.sinks
        """Whether torch's operator lacks something the spec wants, so that every piece needs a mask."""
        self._dtype = getattr(torch, spec.dtype)
        self._group = spec.num_heads // spec.num_kv_heads
        self._heads = spec.num_kv_heads
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * self._dtype.itemsize
        self._bucket_tokens = BUCKET_BYTES // token_bytes
        self._slack_tokens = SLACK_BYTES // token_bytes
        self._scratch = torch.empty(2, 0, dtype=self._dtype)

    def plan(self, batch: AttnBatch) -> Plan:
        """The work of one step."""
        starts = batch.q_starts_host[: batch.num_seqs + 1].astype(np.int64)
        kv_lens = batch.kv_lens_host[: batch.num_seqs].astype(np.int64)
        new = np.diff(starts)
        table = batch.block_table.numpy()
        rows = []
        for num_new in np.unique(new[(new > 0) & (new <= FEW)]).tolist():
            seqs = np.flatnonzero(new == num_new)
            rows += [self._bucket(starts, kv_lens, table, part, num_new) for part in self._split(kv_lens, seqs)]
        pieces = [
            piece
            for i in np.flatnonzero(new > FEW).tolist()
            for piece in self._pieces(int(starts[i]), int(new[i]), int(kv_lens[i]), table[i])
        ]
        return Plan(slots=batch.slots, num_used=int(starts[-1]), rows=tuple(rows), pieces=tuple(pieces))

    def _split(self, kv_lens: Ints, seqs: Ints) -> Iterator[Ints]:
        """Cut sequences into buckets of similar context length, each in batch order."""
        order = seqs[np.argsort(-kv_lens[seqs], kind="stable")]
        lengths = kv_lens[order].tolist()
        begin, waste = 0, 0
        for i, length in enumerate(lengths):
            waste += lengths[begin] - length
            if i > begin and (waste > self._slack_tokens or (i - begin + 1) * lengths[begin] > self._bucket_tokens):
                yield np.sort(order[begin:i])
                begin, waste = i, 0
        yield np.sort(order[begin:])

    def _bucket(self, starts: Ints, kv_lens: Ints, table: NDArray[np.int32], seqs: Ints, num_new: int) -> Rows:
        size, window = self.spec.block_size, self.spec.window
        lens = kv_lens[seqs]
        context = lens - num_new
        # With a window nothing before the first query's window is read: those blocks may already be someone else's.
        first = np.zeros_like(lens) if window is None else np.maximum(0, context - window + 1) // size
        num_blocks = int((-(-lens // size) - first).max())
        columns = np.minimum(first[:, None] + np.arange(num_blocks), table.shape[1] - 1)
        blocks = table[seqs[:, None], columns].astype(np.int64)
        last = lens - first * size
        if num_new == 1 and window is None and (last == last[0]).all():
            length, mask = int(last[0]), None
        else:
            length = num_blocks * size
            query = (context - first * size)[:, None] + np.arange(num_new)
            mask = self._mask(query, last, length)
            if num_new > 1:
                mask = mask.repeat_interleave(self._group, dim=1)
            mask = mask.unsqueeze(1)
        tokens = (starts[seqs][:, None] + np.arange(num_new)).reshape(-1)
        return Rows(
            num_rows=len(seqs),
            num_new=num_new,
            tokens=pick(tokens),
            context=self._context(blocks.reshape(-1), len(seqs), length),
            mask=mask,
        )

    def _pieces(self, start: int, num_new: int, kv_len: int, table: NDArray[np.int32]) -> Iterator[Piece]:
        size, window, context = self.spec.block_size, self.spec.window, kv_len - num_new
        fresh = context == 0
        inside = window is None or num_new <= window
        plain = not self.by_hand and fresh and inside
        if plain or not self.spec.causal:
            # Everything it sees came with this step (or all of the context is seen by all).
            own = slice(start, start + num_new)
            keys = own if fresh else self._context(table[: -(-kv_len // size)], 1, kv_len)
            yield Piece(tokens=own, keys=keys, mask=None)
            return
        for a in range(0, num_new, PIECE):
            b = min(a + PIECE, num_new)
            low = 0 if window is None else max(0, context + a - window + 1)
            high = context + b
            if fresh:
                origin, keys = low, slice(start + low, start + high)
            else:
                origin = low // size * size
                keys = self._context(table[origin // size : -(-high // size)], 1, high - origin)
            query = np.arange(context + a, context + b)[None] - origin
            mask = self._mask(query, np.array([high - origin]), high - origin)[0]
            yield Piece(tokens=slice(start + a, start + b), keys=keys, mask=mask)

    def _mask(self, query: Ints, valid: Ints, length: int) -> torch.Tensor:
        """query [n, t]: positions, counted from the first key; valid [n]: keys that exist. 0 or -inf, [n, t, L]."""
        key = np.arange(length)
        seen = key <= query[..., None] if self.spec.causal else (key < valid[:, None])[:, None]
        if self.spec.window is not None:
            seen = seen & (key > query[..., None] - self.spec.window)
        hidden = np.where(seen, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(np.broadcast_to(hidden, (*query.shape, length)).copy()).to(self._dtype)

    def _context(self, blocks: NDArray[np.integer], num_rows: int, length: int) -> Context:
        """Blocks in row order. Buffers are kept and shared: memory taken anew in each layer costs page faults."""
        picked = pick(blocks.astype(np.int64))
        context = Context(blocks=picked, num_rows=num_rows, length=length, gathered=None)
        if isinstance(picked, slice):
            return context
        shape = (len(blocks), self.spec.block_size, self._heads, self.spec.head_dim)
        need = math.prod(shape)
        if need > self._scratch.shape[1]:
            self._scratch = torch.empty(2, need, dtype=self._dtype)
        block_k, block_v = self._scratch[:, :need].view(2, *shape).unbind()
        return replace(context, gathered=(block_k, block_v, context.view(block_k), context.view(block_v)))


def pick(indices: Ints) -> Pick:
    """Consecutive indices as a slice, others as a tensor."""
    if len(indices) and (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(indices))
