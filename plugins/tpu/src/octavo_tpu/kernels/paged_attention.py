"""Paged attention in Pallas, for decode steps and steps with prompts alike: queries come in blocks of one sequence.

    grid (NB, Hkv, P): block of queries, KV head, page of its sequence; pages innermost

For each page the sequence's block table says which one of the cache to fetch into VMEM; running maximum, sum and result
(Milakov & Gimelshein, 2018; Dao et al., 2022) stay in VMEM from page to page. Pages outside a block's context are not
fetched: their index is that of a neighbour, and a fetch of the page that is there already is none.

Legend: NB blocks of W query tokens, G query heads to a KV head, R = W * G rows, Hkv KV heads, D head_dim, B pages of N
tokens in the cache, S sequences, P pages of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

when: Callable[[Any], Callable[[Callable[[], None]], Any]] = pl.when

MASKED = -1e30
"""Instead of -inf, which would make a NaN of rows that see nothing."""


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    table: jax.Array,
    seq: jax.Array,
    first: jax.Array,
    count: jax.Array,
    width: int,
    scale: float,
    window: int,
    softcap: float,
) -> jax.Array:
    """q [NB, Hkv, R, D] -> results of the same shape; rows that see nothing become zero.

    Row w * G + g is head g of the block's token w, at position first + w. caches [B, Hkv, N, D]; table int32 [S, P];
    seq, first, count int32 [NB]. scale, window, softcap: as in `AttentionSpec`, 0 for none.
    """
    cache = (k_cache, v_cache, table)
    return attend(q, *cache, seq, first, count, width=width, scale=scale, window=window, softcap=softcap)


def attend(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    table: jax.Array,
    seq: jax.Array,
    first: jax.Array,
    count: jax.Array,
    *,
    width: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    interpret: object = False,
) -> jax.Array:
    """`paged_attention`. interpret: run it in Pallas's interpreter, as tests do."""
    num_blocks, num_kv_heads, rows, dim = q.shape
    page_size, num_pages = k_cache.shape[2], table.shape[1]

    def query(b: int, h: int, p: int, *scalars: jax.Array) -> tuple[int, int, int, int]:
        return b, h, 0, 0

    def page(b: int, h: int, p: int, *scalars: jax.Array) -> tuple[jax.Array, int, int, int]:
        table, seq, first, count = scalars
        low, high = pages_seen(first[b], count[b], page_size, window)
        return table[seq[b], jnp.clip(p, low, high)], h, 0, 0

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(num_blocks, num_kv_heads, num_pages),
        in_specs=[
            pl.BlockSpec((1, 1, rows, dim), query),
            pl.BlockSpec((1, 1, page_size, dim), page),
            pl.BlockSpec((1, 1, page_size, dim), page),
        ],
        out_specs=pl.BlockSpec((1, 1, rows, dim), query),
        scratch_shapes=[
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((rows, 1), jnp.float32),
            pltpu.VMEM((rows, dim), jnp.float32),
        ],
    )
    body = functools.partial(one_page, group=rows // width, scale=scale, window=window, softcap=softcap)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return pl.pallas_call(body, grid_spec=grid, out_shape=out, interpret=interpret)(
        table, seq, first, count, q, k_cache, v_cache
    )


def pages_seen(first: jax.Array, count: jax.Array, page_size: int, window: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last page that any of a block's tokens sees. `div`, as `//` asks what chip the process has."""
    high = jax.lax.div(jnp.maximum(first + count - 1, 0), page_size)
    low = jax.lax.div(jnp.maximum(first - window + 1, 0), page_size) if window else jnp.zeros_like(high)
    return low, high


def one_page(
    table: Any,
    seq: Any,
    first: Any,
    count: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    peak: Any,
    total: Any,
    result: Any,
    *,
    group: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Fold one page into a block's running result. Arguments are Pallas references; peak, total, result: VMEM."""
    block, page = pl.program_id(0), pl.program_id(2)
    page_size = k.shape[2]
    start, end = first[block], first[block] + count[block]
    low, high = pages_seen(start, count[block], page_size, window)

    @when(page == 0)
    def _() -> None:
        peak[...] = jnp.full_like(peak, MASKED)
        total[...] = jnp.zeros_like(total)
        result[...] = jnp.zeros_like(result)

    @when((page >= low) & (page <= high) & (count[block] > 0))
    def _() -> None:
        # A matrix unit multiplies bfloat16; float32 asks for the passes that keep its digits.
        precise = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        dot = functools.partial(jax.lax.dot_general, precision=precise, preferred_element_type=jnp.float32)
        logits = dot(q[0, 0], k[0, 0], (((1,), (1,)), ((), ()))) * scale  # [R, N]
        if softcap:
            logits = softcap * jnp.tanh(logits / softcap)
        query_at = start + jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0), group)
        key_at = page * page_size + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        seen = (key_at <= query_at) & (key_at < end)
        if window:
            seen &= key_at > query_at - window
        logits = jnp.where(seen, logits, MASKED)
        new_peak = jnp.maximum(peak[...], logits.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(logits - new_peak), 0.0)
        keep = jnp.exp(peak[...] - new_peak)
        # Slots behind a context hold what was left there, and 0 * NaN is NaN.
        written = page * page_size + jax.lax.broadcasted_iota(jnp.int32, v.shape[2:], 0) < end
        values = jnp.where(written, v[0, 0], jnp.zeros_like(v[0, 0]))
        total[...] = total[...] * keep + weights.sum(axis=1, keepdims=True)
        result[...] = result[...] * keep + dot(weights.astype(v.dtype), values, (((1,), (0,)), ((), ())))
        peak[...] = new_peak

    @when(page == pl.num_programs(2) - 1)
    def _() -> None:
        out[0, 0] = (result[...] / jnp.maximum(total[...], 1e-30)).astype(out.dtype)
