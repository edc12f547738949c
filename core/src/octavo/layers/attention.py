"""Self-attention: packed projection, norm and rotation, the platform's attention backend, output projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from octavo.layers.context import BuildContext, StepState, dtype_name
from octavo.layers.linear import Linear, RowLinear, Rows, Shard, share
from octavo.layers.norm import RMSNorm, ShardedRMSNorm
from octavo.layers.weight import Range
from octavo.plugin.contracts import AttnLayer, Communicator
from octavo.plugin.specs import AttentionSpec

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a model says about one attention layer; numbers are of the whole model, not of a rank.

    window, softcap: as in `AttentionSpec`. fused: the checkpoint holds one `qkv_proj`.
    qk_norm: norm queries and keys head by head, or all heads of a token as one row.
    float32_norm, unit_offset: how their weights are kept, see `RMSNorm`.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False
    qk_norm: Literal["head", "row"] | None = None
    norm_eps: float = 1e-6
    float32_norm: bool = False
    unit_offset: bool = False


class Attention:
    """x [T, hidden] -> [T, hidden]. cos_sin: the rope table, None for a layer without positions."""

    def __init__(self, ctx: BuildContext, prefix: str, options: AttentionOptions, *, cos_sin: Tensor | None) -> None:
        dim = options.head_dim
        heads = share(options.num_heads, ctx.comm, "num_attention_heads")
        kv_heads = share_kv_heads(options.num_kv_heads, ctx.comm)
        self._num_heads, self._num_kv_heads = heads[1], kv_heads[1]
        self._cos_sin = cos_sin
        self._eps = options.norm_eps
        self._qkv: Linear | ShardedNormProjection = Linear(
            ctx, _qkv_shards(prefix, options, heads, kv_heads), options.hidden_size, bias=options.qkv_bias
        )
        self._q_norm = self._k_norm = None
        if options.qk_norm == "row" and ctx.comm.size > 1:
            self._qkv = ShardedNormProjection(ctx, prefix, options, heads, kv_heads, self._qkv)
        elif options.qk_norm:
            widths = (dim, dim) if options.qk_norm == "head" else (heads[1] * dim, kv_heads[1] * dim)
            self._q_norm, self._k_norm = (
                RMSNorm(
                    ctx,
                    f"{prefix}.{name}",
                    width,
                    options.norm_eps,
                    float32_weight=options.float32_norm,
                    unit_offset=options.unit_offset,
                )
                for name, width in zip(("q_norm", "k_norm"), widths, strict=True)
            )
        # A window that no sequence can outgrow is no window: such layers share the group of full attention.
        windowed = options.window is not None and options.window < ctx.limits.max_model_len
        spec = AttentionSpec(
            num_heads=heads[1],
            num_kv_heads=kv_heads[1],
            head_dim=dim,
            scale=options.scale,
            dtype=dtype_name(ctx.dtype),
            kv_dtype=ctx.kv_dtype,
            block_size=ctx.block_size,
            window=options.window if windowed else None,
            softcap=options.softcap,
        )
        self._index, self._spec = ctx.attention_layer(spec)
        self._kv_group = ctx.attention.kv_of_spec[self._spec]
        self._layer = AttnLayer(index=self._index)
        backend = ctx.attention.backends[self._spec]
        self._run: Callable[..., Tensor] = backend.run
        self._written = bool(getattr(backend, "takes_written_kv", False))
        self._split = ctx.op(
            "qkv_norm_rope_write" if self._written else "qkv_norm_rope",
            num_heads=heads[1],
            num_kv_heads=kv_heads[1],
            head_dim=dim,
            rotated=0 if cos_sin is None else cos_sin.shape[1],
            norm=(options.qk_norm or "none") if self._q_norm else "none",
        )
        self._out = RowLinear(
            ctx, f"{prefix}.o_proj", options.num_heads * dim, options.hidden_size, bias=options.out_bias
        )

    @property
    def scaled_rows_from(self) -> float:
        """From how many tokens on x may be `ScaledRows`, and is better so."""
        return self._qkv.scaled_rows_from

    def __call__(self, x: Rows, step: StepState) -> Tensor:
        kv, layer = step.kv[self._index], self._layer
        packed = (
            self._qkv(x),
            step.positions,
            self._cos_sin,
            self._q_norm.weight if self._q_norm else None,
            self._k_norm.weight if self._k_norm else None,
            self._eps,
            self._num_heads,
            self._num_kv_heads,
        )
        if self._written:
            slots = step.slots[self._kv_group]
            q, k, v = self._split(*packed, kv.k, kv.v, slots, layer.k_scale, layer.v_scale)[0], None, None
        else:
            q, k, v = self._split(*packed)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._run(layer, q, k, v, kv, step.plans[self._spec], out)
        return self._out(out.view(out.shape[0], -1))


class ShardedNormProjection:
    """A packed projection whose queries and keys are normed over all ranks' heads. x [T, hidden] -> packed qkv."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        options: AttentionOptions,
        heads: Range,
        kv_heads: Range,
        project: Linear,
    ) -> None:
        dim = options.head_dim
        self._project = project
        self._sizes = [heads[1] * dim, kv_heads[1] * dim, kv_heads[1] * dim]
        self._q_norm, self._k_norm = (
            ShardedRMSNorm(ctx, f"{prefix}.{name}", total * dim, (first * dim, count * dim), options.norm_eps)
            for name, total, (first, count) in (
                ("q_norm", options.num_heads, heads),
                ("k_norm", options.num_kv_heads, kv_heads),
            )
        )

    @property
    def scaled_rows_from(self) -> float:
        """As the projection's."""
        return self._project.scaled_rows_from

    def __call__(self, x: Rows) -> Tensor:
        q, k, v = torch.split(self._project(x), self._sizes, dim=-1)
        return torch.cat((self._q_norm(q), self._k_norm(k), v), dim=-1)


def share_kv_heads(num_kv_heads: int, comm: Communicator) -> Range:
    """This rank's KV heads as (first, count). With more ranks than heads, neighbouring ranks hold the same one."""
    if comm.size <= num_kv_heads or comm.size % num_kv_heads:
        return share(num_kv_heads, comm, "num_key_value_heads")
    return comm.rank * num_kv_heads // comm.size, 1


def _qkv_shards(prefix: str, options: AttentionOptions, heads: Range, kv_heads: Range) -> list[Shard]:
    dim = options.head_dim
    q_rows, kv_rows = options.num_heads * dim, options.num_kv_heads * dim
    q = (heads[0] * dim, heads[1] * dim)
    kv = (kv_heads[0] * dim, kv_heads[1] * dim)
    if options.fused:
        keep = (q, (q_rows + kv[0], kv[1]), (q_rows + kv_rows + kv[0], kv[1]))
        return [Shard(name=f"{prefix}.qkv_proj", out_features=q_rows + 2 * kv_rows, keep=keep)]
    return [
        Shard(name=f"{prefix}.q_proj", out_features=q_rows, keep=(q,)),
        Shard(name=f"{prefix}.k_proj", out_features=kv_rows, keep=(kv,)),
        Shard(name=f"{prefix}.v_proj", out_features=kv_rows, keep=(kv,)),
    ]
