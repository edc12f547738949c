"""Paged attention out of torch's own CPU operators.

Planning (once a step, in numpy) sorts the sequences into two kinds of work, and every layer then runs the same list:

    rows    sequences with few new tokens (decodes, checked drafts), batched: equal query lengths and similar context
            lengths go into one bucket, whose blocks are gathered side by side and padded to its longest context
    pieces  up to PIECE new tokens of one prompt, against the part of its context that they see

Both end in one call of scaled_dot_product_attention. The cache is stored BNHC, so that writing is one copy of whole
token rows and a gathered sequence is contiguous; a bucket whose blocks happen to lie side by side is read in place.

Shapes: T tokens, n rows of a bucket, t new tokens of each, L context length (padded), H kv heads, G query heads per
kv head, D head_dim, B blocks, N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from octavo.plugin import (
    YES,
    AttentionSpec,
    AttnBatch,
    AttnLayer,
    BatchLimits,
    Device,
    KVLayout,
    KVSpec,
    KVView,
    Support,
    no,
)

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
class Rows:
    """A bucket. tokens: its n * t tokens in the packed batch. blocks: n * L / N blocks. mask [n, 1, t * G or 1, L]."""

    num_rows: int
    num_new: int
    tokens: Pick
    blocks: Pick
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Query tokens of one prompt. keys: a range of the packed batch if `blocks` is None, else of the gathered blocks.

    mask [t, L]; None is plain causal (or all, if the spec is not causal).
    """

    tokens: slice
    keys: slice
    blocks: Pick | None
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The step's work for every layer. slots int64 [T]. num_used: tokens that belong to a sequence."""

    slots: torch.Tensor
    num_used: int
    rows: tuple[Rows, ...]
    pieces: tuple[Piece, ...]


class PagedAttention:
    """`AttentionBackend` for CPUs. Model dtype in, out and in the cache."""

    name: ClassVar[str] = "cpu_paged"

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if device.type != "cpu":
            return no(f"needs a cpu device, not {device.type}")
        if spec.dtype not in ("bfloat16", "float16", "float32"):
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype != spec.dtype:
            return no(f"keeps the cache in the model's {spec.dtype}, not {spec.kv_dtype}")
        if spec.num_heads % spec.num_kv_heads:
            return no(f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads")
        if spec.window is not None and not spec.causal:
            return no("a sliding window needs causal attention")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BNHC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self.spec = spec
        self._dtype = getattr(torch, spec.dtype)
        self._group = spec.num_heads // spec.num_kv_heads
        self._heads = spec.num_kv_heads
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * self._dtype.itemsize
        self._bucket_tokens = BUCKET_BYTES // token_bytes
        self._slack_tokens = SLACK_BYTES // token_bytes
        self._scratch = torch.empty(2, 0, dtype=self._dtype)

    # -- planning --

    def plan(self, batch: AttnBatch, *, graph: bool) -> Plan:
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
        self._reserve(rows, pieces)
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
            blocks=pick(blocks.reshape(-1)),
            length=length,
            mask=mask,
        )

    def _pieces(self, start: int, num_new: int, kv_len: int, table: NDArray[np.int32]) -> Iterator[Piece]:
        size, window, context = self.spec.block_size, self.spec.window, kv_len - num_new
        fresh = context == 0
        inside = window is None or num_new <= window
        plain = not self._by_hand and fresh and inside
        if plain or not self.spec.causal:
            # Everything it sees came with this step (or all of the context is seen by all).
            blocks = None if fresh else pick(table[: -(-kv_len // size)].astype(np.int64))
            keys = slice(start, start + num_new) if fresh else slice(0, kv_len)
            yield Piece(tokens=slice(start, start + num_new), keys=keys, blocks=blocks, mask=None)
            return
        for a in range(0, num_new, PIECE):
            b = min(a + PIECE, num_new)
            low = 0 if window is None else max(0, context + a - window + 1)
            high = context + b
            if fresh:
                origin, blocks, keys = low, None, slice(start + low, start + high)
            else:
                origin = low // size * size
                blocks = pick(table[origin // size : -(-high // size)].astype(np.int64))
                keys = slice(0, high - origin)
            query = np.arange(context + a, context + b)[None] - origin
            mask = self._mask(query, np.array([high - origin]), high - origin)[0]
            yield Piece(tokens=slice(start + a, start + b), keys=keys, blocks=blocks, mask=mask)

    def _mask(self, query: Ints, valid: Ints, length: int) -> torch.Tensor:
        """query [n, t]: positions, counted from the first key; valid [n]: keys that exist. 0 or -inf, [n, t, L]."""
        key = np.arange(length)
        seen = key <= query[..., None] if self.spec.causal else (key < valid[:, None])[:, None]
        if self.spec.window is not None:
            seen = seen & (key > query[..., None] - self.spec.window)
        hidden = np.where(seen, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(np.broadcast_to(hidden, (*query.shape, length)).copy()).to(self._dtype)

    def _reserve(self, rows: list[Rows], pieces: list[Piece]) -> None:
        """Grow the gather buffers: memory taken anew in each layer would cost page faults."""
        picks = [*(r.blocks for r in rows), *(p.blocks for p in pieces)]
        block = self._heads * self.spec.block_size * self.spec.head_dim
        need = max((len(p) for p in picks if isinstance(p, torch.Tensor)), default=0) * block
        if need > self._scratch.shape[1]:
            self._scratch = torch.empty(2, need, dtype=self._dtype)

    # -- running --

    def run(
        self,
        layer: AttnLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KVView,
        plan: Plan,
        out: torch.Tensor,
    ) -> torch.Tensor:
        heads, group, dim = self._heads, self._group, self.spec.head_dim
        # [B, H, N, D] as stored: [B, N, H, D].
        cache_k, cache_v = kv.k.transpose(1, 2), kv.v.transpose(1, 2)
        cache_k.view(-1, heads, dim).index_copy_(0, plan.slots, k)
        cache_v.view(-1, heads, dim).index_copy_(0, plan.slots, v)
        for work in plan.rows:
            n, t = work.num_rows, work.num_new
            context_k = self._read(cache_k, work.blocks, 0, n)[:, :, : work.length]
            context_v = self._read(cache_v, work.blocks, 1, n)[:, :, : work.length]
            queries = take(q, work.tokens).view(n, t, heads, group, dim)
            folded = queries.transpose(1, 2).reshape(n, heads, t * group, dim)
            answer = self._attend(layer, folded, context_k, context_v, work.mask, t)
            put(out, work.tokens, answer.view(n, heads, t, group, dim).transpose(1, 2))
        for piece in plan.pieces:
            if piece.blocks is None:
                context_k, context_v = k[piece.keys].transpose(0, 1), v[piece.keys].transpose(0, 1)
            else:
                context_k = self._read(cache_k, piece.blocks, 0, 1)[0, :, piece.keys]
                context_v = self._read(cache_v, piece.blocks, 1, 1)[0, :, piece.keys]
            # Kv heads become the batch and their query heads share one key by stride 0: nothing is expanded.
            t = piece.tokens.stop - piece.tokens.start
            grouped = q[piece.tokens].view(t, heads, group, dim).permute(1, 2, 0, 3)
            shape = (heads, group, context_k.shape[1], dim)
            answer = self._attend(
                layer, grouped, context_k[:, None].expand(shape), context_v[:, None].expand(shape), piece.mask, 0
            )
            out[piece.tokens].view(t, heads, group, dim).copy_(answer.permute(2, 0, 1, 3))
        if plan.num_used < len(out):
            out[plan.num_used :].zero_()
        return out

    def _read(self, cache: torch.Tensor, blocks: Pick, which: int, num_rows: int) -> torch.Tensor:
        """The picked blocks of a cache [B, N, H, D] as [n, H, L, D]."""
        if isinstance(blocks, slice):
            found = cache[blocks]
        else:
            shape = (len(blocks), *cache.shape[1:])
            found = self._scratch[which, : len(blocks) * cache[0].numel()].view(shape)
            torch.index_select(cache, 0, blocks, out=found)
        return found.reshape(num_rows, -1, *cache.shape[2:]).transpose(1, 2)

    @property
    def _by_hand(self) -> bool:
        return self.spec.softcap is not None or self.spec.sinks

    def _attend(
        self,
        layer: AttnLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        num_new: int,
    ) -> torch.Tensor:
        """q [X, Y, R, D]; k, v [X, Y, L, D]; mask broadcast to [X, Y, R, L]. num_new: t of rows, 0 for a piece."""
        spec = self.spec
        if not self._by_hand:
            causal = num_new == 0 and mask is None and spec.causal
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale)
        # torch has no operator with a cap or sinks: the plain formula, in float32.
        scores = torch.matmul(q.float() * spec.scale, k.float().transpose(-1, -2))
        if spec.softcap is not None:
            scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if mask is not None:
            scores += mask
        if spec.sinks:
            assert layer.sinks is not None, "the spec has sinks, the layer brings none"
            sinks = layer.sinks.float().view(self._heads, 1, self._group)
            if num_new:
                column = sinks.expand(-1, num_new, -1).reshape(1, self._heads, -1, 1)
            else:
                column = sinks.view(self._heads, self._group, 1, 1)
            scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
            weights = scores.softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        return torch.matmul(weights, v.float()).to(q.dtype)


def pick(indices: Ints) -> Pick:
    """Consecutive indices as a slice, others as a tensor."""
    if len(indices) and (np.diff(indices) == 1).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(indices))


def take(source: torch.Tensor, where: Pick) -> torch.Tensor:
    """source[where] without the general indexing machinery."""
    return source[where] if isinstance(where, slice) else source.index_select(0, where)


def put(out: torch.Tensor, where: Pick, values: torch.Tensor) -> None:
    """out[where] = values: out [T, H, D], values [n, t, heads, G, D] of any strides."""
    if isinstance(where, slice):
        out[where].view(values.shape).copy_(values)
    else:
        out.index_copy_(0, where, values.reshape(-1, *out.shape[1:]))
