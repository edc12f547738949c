"""The attention backends of the TPU: a Pallas kernel on a chip, matrix products where Pallas kernels do not run.

Both see a step as blocks of queries (`attention_blocks`), cut once a step and shared by all layers.

Legend: T tokens, S sequences, NB blocks of W query tokens, Hkv KV heads, G query heads to each, D head_dim, B pages of
N tokens, P pages of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._higher_order_ops import scan
from torch.nn import functional

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
from octavo_tpu.attention_blocks import QueryBlocks, cut_blocks

MASKED = -1e30
"""Instead of -inf, which would make a NaN of rows that see nothing."""

ROUND_BYTES = 128 << 20
"""Most bytes of each array that `matmul` holds beside its results, in float32: the keys, values and logits of a round.
More only where one page of every block is more: NB * Hkv * N * max(D, W * G) * 4."""


@dataclass(kw_only=True)
class Plan:
    """A step's batch, and its blocks once `start_step` has cut them. num_pages: pages of a context looked at."""

    batch: AttnBatch
    decode: bool
    num_pages: int
    blocks: QueryBlocks | None = None


class BlockAttention:
    """What both backends share: planning, the write into the cache, cutting queries into blocks and joining results."""

    name: ClassVar[str]

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if spec.sinks:
            return no("no attention sinks")
        if not spec.causal:
            return no("causal attention only")
        if spec.kv_dtype not in ("bfloat16", "float32"):
            return no(f"no cache of {spec.kv_dtype}")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout | None:
        """That of the platform, which knows the device: pages of one head lie together, [B, Hkv, N, D], of which a
        fetch takes one [N, D]."""
        return None

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self.spec = spec
        self.max_pages = -(-limits.max_model_len // spec.block_size)

    def plan(self, batch: AttnBatch, *, graph: bool) -> Plan:
        # Compiled steps serve every context up to the longest; others are cut to powers of two of pages, as each
        # number of pages is a shape of its own to compile.
        needed = self.max_pages if graph else power_of_two(-(-batch.max_kv_len // self.spec.block_size))
        num_pages = min(max(needed, 1), batch.block_table.shape[1])
        return Plan(
            batch=batch, decode=batch.max_q_len == 1 and batch.num_tokens == batch.num_seqs, num_pages=num_pages
        )

    def start_step(self, plan: Plan) -> None:
        """Cut the step's queries into blocks."""
        plan.blocks = cut_blocks(plan.batch, decode=plan.decode)

    def run(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, kv: KVView, plan: Plan, out: Tensor) -> Tensor:
        blocks, batch = plan.blocks, plan.batch
        assert blocks is not None, "start_step comes before run"
        write(kv, k, v, layer, batch.slots)
        queries = blocks.cut(q, self.spec.num_kv_heads)
        table = batch.block_table[:, : plan.num_pages].to(torch.int32)
        result = self.attend(queries, kv, table, blocks, layer)
        return out.copy_(blocks.join(result, self.spec.num_heads))

    def attend(self, queries: Tensor, kv: KVView, table: Tensor, blocks: QueryBlocks, layer: AttnLayer) -> Tensor:
        """queries [NB, Hkv, W * G, D]; table int32 [S, P]. Returns their results, of the same shape."""
        raise NotImplementedError


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def write(kv: KVView, k: Tensor, v: Tensor, layer: AttnLayer, slots: Tensor) -> None:
    """Put k, v [T, Hkv, D] into their slots [T]."""
    size = kv.k.shape[2]
    page, offset = slots // size, slots % size
    for pages, values, scale in ((kv.k, k, layer.k_scale), (kv.v, v, layer.v_scale)):
        stored = values if isinstance(scale, float) and scale == 1.0 else values / by_head(scale)
        pages[page, :, offset] = stored.to(pages.dtype)


def by_head(scale: float | Tensor) -> float | Tensor:
    """A scale, or one for each KV head, as it goes with [..., Hkv, D]."""
    return scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale


class MatmulAttention(BlockAttention):
    """Paged attention as two matrix products over the gathered context: runs wherever XLA does.

    A context is walked in rounds of as many pages as `ROUND_BYTES` allows, with a running softmax (Milakov and
    Gimelshein, arXiv:1805.02867), so that how much memory a step takes does not depend on the context.

    Heads come first here: products of several matrices are one of [Hkv * NB] to XLA, which can divide over chips what
    lies outermost there and would else gather the keys and values of all heads on each.
    """

    name: ClassVar[str] = "matmul"

    def attend(self, queries: Tensor, kv: KVView, table: Tensor, blocks: QueryBlocks, layer: AttnLayer) -> Tensor:
        spec, width = self.spec, blocks.width
        size = kv.k.shape[2]
        num_pages = min(pages_of_round(queries, size), table.shape[1])  # P, from here on
        num_rounds = -(-table.shape[1] // num_pages)
        table = functional.pad(table, (0, num_rounds * num_pages - table.shape[1]))
        pages = table[blocks.seq].view(-1, num_rounds, num_pages).transpose(0, 1)  # [rounds, NB, P]
        begins = torch.arange(num_rounds, dtype=torch.int32, device=table.device) * (num_pages * size)
        scaled = queries.float() * (spec.scale * by_block_head(layer.k_scale))
        scaled = scaled.transpose(0, 1).contiguous()  # [Hkv, NB, W * G, D]; what a loop gives back is contiguous too
        place = torch.arange(num_pages * size, dtype=torch.int32, device=table.device)
        row = torch.arange(width, dtype=torch.int32, device=table.device)
        position = (blocks.first[:, None] + row)[..., None]  # [NB, W, 1]
        past = (blocks.first + blocks.count)[:, None, None]

        def walk(state: tuple[Tensor, ...], pages: Tensor, begin: Tensor) -> tuple[Tensor, ...]:
            """One round: what the softmax and its product with V have become behind it."""
            largest, total, result = state
            # [NB, P, Hkv, N, D] -> [Hkv, NB, P * N, D]
            keys, values = (one[pages].permute(2, 0, 1, 3, 4).flatten(2, 3).float() for one in (kv.k, kv.v))
            logits = scaled @ keys.transpose(-1, -2)  # [Hkv, NB, W * G, P * N]
            if spec.softcap is not None:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            context = begin + place
            seen = (context <= position) & (context < past)
            if spec.window is not None:
                seen &= context > position - spec.window
            seen = seen.repeat_interleave(queries.shape[2] // width, dim=1)  # [NB, W * G, P * N]
            logits = torch.where(seen, logits, MASKED)
            most = torch.maximum(largest, logits.amax(dim=-1, keepdim=True))
            kept = torch.exp(largest - most)
            weights = torch.where(seen, torch.exp(logits - most), 0.0)  # a row that sees nothing has MASKED as its most
            total = total * kept + weights.sum(dim=-1, keepdim=True)
            # Slots behind a context hold what was left there, and 0 * NaN is NaN.
            return most, total, result * kept + weights @ torch.nan_to_num(values)

        none = torch.zeros_like(scaled[..., :1])
        start = (none + MASKED, none, torch.zeros_like(scaled))
        _, total, result = in_rounds(walk, start, pages, begins)
        result = (result / torch.where(total > 0, total, 1.0)).transpose(0, 1).contiguous()
        return (result * by_block_head(layer.v_scale)).to(queries.dtype)


def pages_of_round(queries: Tensor, page_size: int) -> int:
    """How many pages of each block's context are walked at once: see `ROUND_BYTES`. queries [NB, Hkv, W * G, D]."""
    num_blocks, num_kv_heads, rows, dim = queries.shape
    return max(1, ROUND_BYTES // (num_blocks * num_kv_heads * max(rows, dim) * page_size * torch.float32.itemsize))


def in_rounds(
    walk: Callable[..., tuple[Tensor, ...]], state: tuple[Tensor, ...], *rounds: Tensor
) -> tuple[Tensor, ...]:
    """walk(state, *items) for the items that `rounds` hold along their first dimension, each giving the next state.

    A compiled step has a loop of them, whose memory is that of one round; unrolled, XLA might gather all at once.
    """
    if torch.compiler.is_compiling() and len(rounds[0]) > 1:
        state, _ = scan(lambda state, items: (walk(state, *items), ()), state, rounds)
        return state
    for items in zip(*(one.unbind(0) for one in rounds), strict=True):
        state = walk(state, *items)
    return state


def by_block_head(scale: float | Tensor) -> float | Tensor:
    """A scale, or one for each KV head, as it goes with [NB, Hkv, rows, D]."""
    return scale[:, None, None] if isinstance(scale, Tensor) and scale.dim() else scale


class PallasAttention(BlockAttention):
    """The kernel of `kernels/paged_attention.py`, as an operator of torch."""

    name: ClassVar[str] = "pallas"

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if not getattr(device, "has_mosaic", False):
            return no("only libtpu compiles Pallas kernels, and this device is not a TPU chip")
        if spec.kv_dtype != spec.dtype:
            return no(f"queries of {spec.dtype} over a cache of {spec.kv_dtype}")
        if spec.head_dim % 64:
            return no(f"head_dim {spec.head_dim} is no multiple of 64")
        return super().supports(spec, device)

    def attend(self, queries: Tensor, kv: KVView, table: Tensor, blocks: QueryBlocks, layer: AttnLayer) -> Tensor:
        spec = self.spec
        # One number goes with the scale of logits; a number for each head does not fit in there.
        k_scale = layer.k_scale if isinstance(layer.k_scale, float) else 1.0
        if isinstance(layer.k_scale, Tensor):
            queries = queries * by_block_head(layer.k_scale)
        result: Tensor = paged_attention_op()(
            queries.to(kv.k.dtype),
            kv.k,
            kv.v,
            table,
            blocks.seq,
            blocks.first,
            blocks.count,
            blocks.width,
            spec.scale * k_scale,
            spec.window or 0,
            spec.softcap or 0.0,
        )
        if isinstance(layer.v_scale, float) and layer.v_scale == 1.0:
            return result
        return (result * by_block_head(layer.v_scale)).to(result.dtype)


@cache
def paged_attention_op() -> Any:
    """The kernel, registered with torch when first used: that imports JAX."""
    from octavo_tpu.kernels.paged_attention import paged_attention

    tpu: Any = torch.tpu  # type: ignore[attr-defined]
    return tpu.pallas.jax_op("octavo_tpu::paged_attention", paged_attention)
