"""Norms, rotations, gates and writes into the cache, as ops of core's catalogue.

Shapes: T tokens, D features or head size, H heads. A kernel reads rows of any stride; last dimensions are contiguous.
"""

from __future__ import annotations

import torch

from octavo.plugin import YES, OpContext, Support, no
from octavo_xpu.native import LANES, NUMBERS, Module, Runtime, pitch

Tensor = torch.Tensor

ROW_ITEMS = 256
"""Most items that work on one row."""
HEADS_AT_ONCE = 16
"""Most heads that one work-group has at once, a sub-group each."""
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def takes_dtype(context: OpContext) -> Support:
    """The `supports` of every op here."""
    return YES if context.dtype in NUMBERS else no(f"no {context.dtype} activations")


def takes_heads(context: OpContext) -> Support:
    """Of ops on packed projections: a norm over a whole token is left to `rms_norm`."""
    if context.params.get("norm") == "row":
        return no("norms each head by itself, not a token's heads as one row")
    return takes_dtype(context)


def row_items(size: int) -> int:
    """Items for a row of `size`: whole sub-groups."""
    return min(ROW_ITEMS, -(-size // LANES) * LANES)


def last_contiguous(t: Tensor) -> Tensor:
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def scale_of(scale: float | Tensor) -> tuple[float, Tensor | None]:
    """A cache's scale as kernels take it: a number, or float32 [Hkv] in its place."""
    return (1.0, scale) if isinstance(scale, Tensor) else (float(scale), None)


class SmallOps:
    """The ops of one device, by their catalogue names."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def _module(self, dtype: torch.dtype) -> Module:
        return self._runtime.module("small.cpp", NUMBER=NUMBERS[str(dtype).removeprefix("torch.")])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """A new tensor of x's shape [..., D]."""
        size = x.shape[-1]
        rows = last_contiguous(x)
        if rows.dim() > 3 or (rows.dim() == 1):
            rows = rows.reshape(-1, size)
        inner = rows.shape[1] if rows.dim() == 3 else 1
        strides = pitch(rows, 0, 1) if rows.dim() == 3 else (*pitch(rows, 0), 0)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_rows = rows.shape[0] * inner
        is_float = int(weight.dtype != x.dtype)
        items = row_items(size)
        kernel = self._module(x.dtype)["rms_norm"]
        kernel((num_rows, 1, 1), (1, 1, items), rows, weight, out, size, inner, *strides, is_float, float(eps))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm, sum) in the memory of x and residual [T, D]."""
        x, residual = x.contiguous(), residual.contiguous()
        rows, size = x.shape
        is_float = int(weight.dtype != x.dtype)
        kernel = self._module(x.dtype)["add_rms_norm"]
        kernel((rows, 1, 1), (1, 1, row_items(size)), x, residual, weight, size, is_float, float(eps))
        return x, residual

    def act_and_mul(self, x: Tensor, kind: str) -> Tensor:
        """x [T, 2 I] -> a new [T, I]."""
        x = last_contiguous(x)
        rows, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, size)
        items = row_items(size)
        kernel = self._module(x.dtype)["act_and_mul"]
        kernel((rows, 1, -(-size // items)), (1, 1, items), x, out, size, *pitch(x, 0), KINDS[kind])
        return out

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """New contiguous q [T, H, D] and k [T, Hkv, D]."""
        q, k = last_contiguous(q), last_contiguous(k)
        tokens, heads, size = q.shape
        out = [t.new_empty(t.shape) for t in (q, k)]
        kernel = self._module(q.dtype)["rope"]
        local = (1, min(HEADS_AT_ONCE, heads + k.shape[1]), LANES)
        table = cos_sin.to(q.dtype)
        sizes = (heads, k.shape[1], size, table.shape[1], *pitch(q, 0, 1), *pitch(k, 0, 1))
        kernel((tokens, 1, 1), local, q, k, *out, positions, table, *sizes)
        return out[0], out[1]

    def kv_write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """In place; returns both caches."""
        self.write(k, v, k_cache, v_cache, slots, 1.0, 1.0)
        return k_cache, v_cache

    def write(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        k_scale: float | Tensor,
        v_scale: float | Tensor,
    ) -> None:
        """k, v [T, Hkv, D] over their scales into caches [B, Hkv, N, D] of their dtype."""
        k, v = last_contiguous(k), last_contiguous(v)
        tokens, heads, size = k.shape
        (k_number, k_scales), (v_number, v_scales) = scale_of(k_scale), scale_of(v_scale)
        kernel = self._module(k.dtype)["kv_write"]
        places = (
            *pitch(k, 0, 1),
            *pitch(v, 0, 1),
            k_cache.shape[2],
            *pitch(k_cache, 0, 1, 2),
            *pitch(v_cache, 0, 1, 2),
        )
        tensors = (k, v, k_cache, v_cache, slots, k_scales, v_scales)
        local = (1, min(HEADS_AT_ONCE, heads), LANES)
        kernel((tokens, 1, 1), local, *tensors, heads, size, *places, k_number, v_number)

    def qkv_norm_rope(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Views of qkv, changed in place: q [T, H, D], k and v [T, Hkv, D]."""
        qkv = last_contiguous(qkv)
        nowhere = (None, None, None, 1.0, 1.0)
        heads = self._packed(qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads, *nowhere)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        return q, k, v

    def qkv_norm_rope_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A view of qkv, q [T, H, D], and both caches."""
        qkv = last_contiguous(qkv)
        into = (k_cache, v_cache, slots, k_scale, v_scale)
        heads = self._packed(qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads, *into)
        return heads[:, :num_heads], k_cache, v_cache

    def _packed(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
        k_cache: Tensor | None,
        v_cache: Tensor | None,
        slots: Tensor | None,
        k_scale: float | Tensor,
        v_scale: float | Tensor,
    ) -> Tensor:
        """qkv as heads [T, H + 2 Hkv, D], normed and rotated."""
        num_tokens, num_packed = qkv.shape[0], num_heads + 2 * num_kv_heads
        size = qkv.shape[1] // num_packed
        table = None if cos_sin is None else cos_sin.to(qkv.dtype)
        rotated = 0 if table is None else table.shape[1]
        (k_number, k_scales), (v_number, v_scales) = scale_of(k_scale), scale_of(v_scale)
        places: tuple[int, ...] = (0,) * 7
        if k_cache is not None and v_cache is not None:
            places = (k_cache.shape[2], *pitch(k_cache, 0, 1, 2), *pitch(v_cache, 0, 1, 2))
        is_float = int(q_weight is not None and q_weight.dtype != qkv.dtype)
        self._module(qkv.dtype)["qkv_norm_rope"](
            (num_tokens, 1, 1),
            (1, min(HEADS_AT_ONCE, num_packed), LANES),
            *(qkv, positions, table, q_weight, k_weight, k_cache, v_cache, slots, k_scales, v_scales),
            *(num_heads, num_kv_heads, size, *pitch(qkv, 0), rotated, is_float, *places),
            *(float(eps), k_number, v_number),
        )
        return qkv.view(num_tokens, num_packed, size)
