"""PagedAttention of `intel-extension-for-pytorch` 2.8 over the paged cache, see `ipex_kernels`.

    keys and values           reshape_and_cache_flash
    prompts and decoding      flash_attn_varlen_func

Lengths are read on the host, so steps that use it are not recorded. The package's builds for GPUs and for CPUs
want a page's tokens and heads in different order. Its operator for one query each, single_query_cached_kv_attention, is
not used: in which order its GPU build reads pages could not be learnt without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

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
from octavo_xpu.ipex_kernels import DTYPES, NoPackageError, close, library, objection

Tensor = torch.Tensor

BLOCK = 16
UNBOUNDED = -1
NO_SOFTCAP = -1.0
WINDOW, SOFTCAP = 8, 1.0
"""Of the test at load: they change every result by more than it allows."""


@dataclass(frozen=True, kw_only=True)
class IpexPlan:
    """tables: its rows side by side, as the operator reads them. kv_starts: int32 [S + 1], sums of lengths.
    num_seqs, num_tokens: without padding."""

    batch: AttnBatch
    tables: Tensor
    kv_starts: Tensor
    num_seqs: int
    num_tokens: int


class IpexAttention:
    """Implements `octavo.plugin.AttentionBackend`."""

    name: ClassVar[str] = "ipex"
    takes_written_kv: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = False

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if spec.dtype not in DTYPES:
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype != spec.dtype:
            return no(f"reads a cache in the activations' dtype, not in {spec.kv_dtype}")
        if not spec.causal:
            return no("only causal attention is implemented")
        if spec.sinks:
            return no("takes no sinks")
        if spec.block_size % BLOCK:
            return no(f"pages of multiples of {BLOCK} tokens, not {spec.block_size}")
        reason = objection(device.torch_device) or attention_objection(
            device.torch_device, window=spec.window is not None, softcap=spec.softcap is not None
        )
        return no(reason) if reason else YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        order = "BNHC" if for_gpus() else "BHNC"
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order=order)

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self._spec = spec
        self._paged: Any = library().llm.modules.PagedAttention

    def plan(self, batch: AttnBatch, *, graph: bool) -> IpexPlan:
        """Lengths as the operators want them."""
        starts = batch.q_starts_host
        num_seqs = int(np.searchsorted(starts, starts[-1]))  # behind them there is padding
        kv_starts = np.append(0, np.cumsum(batch.kv_lens_host[:num_seqs])).astype(np.int32)
        return IpexPlan(
            batch=batch,
            tables=batch.block_table[:num_seqs].contiguous(),
            kv_starts=torch.from_numpy(kv_starts).to(batch.q_starts.device),
            num_seqs=num_seqs,
            num_tokens=int(starts[-1]),
        )

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KVView, plan: IpexPlan, out: Tensor
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`; padding tokens become zero."""
        assert layer.k_scale == layer.v_scale == 1.0, "a cache in the activations' dtype has no scales"
        spec, batch, num = self._spec, plan.batch, plan.num_tokens
        cache = pages(kv.k), pages(kv.v)
        if k is not None and v is not None:
            slots = batch.slots[:num].to(torch.int32)
            self._paged.reshape_and_cache_flash(k[:num].contiguous(), v[:num].contiguous(), *cache, slots)
        out[num:].zero_()
        attend(
            *(out[:num], q[:num].contiguous(), *cache, batch.q_starts[: plan.num_seqs + 1], plan.kv_starts),
            *(batch.max_q_len, batch.max_kv_len, plan.tables),
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        return out


def attend(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor,
    longest_q: int,
    longest_kv: int,
    tables: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Its attention, into `out`. out, q [T, H, D]; keys, values: pages. int32: q_starts, kv_starts [S + 1], sums of
    lengths; tables [S, blocks]."""
    left = UNBOUNDED if window is None else window - 1
    library().llm.modules.PagedAttention.flash_attn_varlen_func(
        *(out, q, keys, values, q_starts, kv_starts, longest_q, longest_kv, scale, True, tables, None, left, UNBOUNDED),
        softcap=softcap or NO_SOFTCAP,
    )


@cache
def attention_objection(device: torch.device, *, window: bool = False, softcap: bool = False) -> str:
    """Why its attention is of no use on a device: the test at load, of decoding and a part of a prompt. With a window
    and a softcap for models that have them: a build that gets those wrong may serve others."""
    try:
        for dtype in DTYPES:
            check_attention(device, dtype, window=WINDOW if window else None, softcap=SOFTCAP if softcap else None)
    except NoPackageError as error:
        return str(error)
    except Exception as error:  # whatever a foreign operator raises
        return f"intel-extension-for-pytorch fails on {device}: {type(error).__name__}: {error}"
    return ""


def check_attention(device: torch.device, dtype: str, *, window: int | None, softcap: float | None) -> None:
    """Two sequences in a cache of strange order, by its operators and by dense attention. Raises NoPackageError."""
    heads, kv_heads, size, lengths = 4, 2, 64, (21, 37)
    generator, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    paged = library().llm.modules.PagedAttention
    shape = (8, BLOCK, kv_heads, size) if for_gpus() else (8, kv_heads, BLOCK, size)
    cache = [torch.zeros(shape, dtype=kind, device=device) for _ in range(2)]
    tables = torch.tensor([[5, 2, 0], [1, 7, 4]], dtype=torch.int32, device=device)
    q, k, v = (
        [torch.randn(n, h, size, generator=generator).to(kind).to(device) for n in lengths]
        for h in (heads, kv_heads, kv_heads)
    )
    places = [[int(tables[s, t // BLOCK]) * BLOCK + t % BLOCK for t in range(n)] for s, n in enumerate(lengths)]
    slots = torch.tensor([place for of in places for place in of], dtype=torch.int32, device=device)
    paged.reshape_and_cache_flash(torch.cat(k), torch.cat(v), *cache, slots)
    facts: dict[str, Any] = {"scale": size**-0.5, "window": window, "softcap": softcap}
    expected = [dense(*of, **facts) for of in zip(q, k, v, strict=True)]
    # Of the first the last query, of the second the last 15.
    starts = torch.tensor([0, 1, 16], dtype=torch.int32, device=device)
    kv_starts = torch.tensor([0, 21, 58], dtype=torch.int32, device=device)
    out = torch.empty(16, heads, size, dtype=kind, device=device)
    asked = torch.cat([q[0][-1:], q[1][-15:]])
    attend(out, asked, cache[0], cache[1], starts, kv_starts, 15, 37, tables, **facts)
    name = "flash_attn_varlen_func" + (" with a window" if window else "") + (" with a softcap" if softcap else "")
    close(name, dtype, out.float().cpu(), torch.cat([expected[0][-1:], expected[1][-15:]]))


def for_gpus() -> bool:
    """Whether the package is its build for GPUs, which wants a page's tokens before its heads."""
    return "xpu" in library().__version__


def pages(cache: Tensor) -> Tensor:
    """A cache [B, Hkv, N, D] as the package wants to see it: contiguous."""
    seen = cache.transpose(1, 2) if for_gpus() else cache
    assert seen.is_contiguous(), "flash_attn_varlen_func takes no strides"
    return seen


def dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention of a whole sequence in float32, on the host. q [T, H, D]; k, v [T, Hkv, D]."""
    q, k, v = (t.float().cpu() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril()
    if window:
        seen = seen.triu(1 - window)
    scores.masked_fill_(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
