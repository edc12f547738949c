"""Gemma 2 (model_type "gemma2"): norms before and after each block, soft-capped logits, every other layer slides."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from octavo.layers.attention import Attention
from octavo.layers.context import BuildContext, StepState
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, attention, gated_mlp, window_of

Tensor = torch.Tensor


class Gemma2(Decoder):
    """Sandwich-norm decoder; embeddings are multiplied by sqrt(hidden)."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(
            config,
            ctx,
            make_layer=gemma2_layer,
            unit_offset=True,
            embedding_scale=embedding_scale(config, ctx),
            softcap=config.final_logit_softcapping,
        )


class SandwichLayer:
    """norm, attention, norm, add; norm, MLP, norm, add. The norms' weights are stored minus one."""

    def __init__(
        self, ctx: BuildContext, prefix: str, attention: Attention, mlp: GatedMLP, *, width: int, eps: float
    ) -> None:
        self._attention, self._mlp = attention, mlp
        self._input_norm, self._attention_norm, self._mlp_norm, self._output_norm = (
            RMSNorm(ctx, f"{prefix}.{name}_layernorm", width, eps, unit_offset=True)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepState) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self._input_norm(x), x
        else:
            x, residual = self._input_norm.add(x, residual)
        x = self._attention_norm(self._attention(x, step))
        x, residual = self._mlp_norm.add(x, residual)
        return self._output_norm(self._mlp(x)), residual


def gemma2_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> SandwichLayer:
    bias = config.attention_bias
    return SandwichLayer(
        ctx,
        f"model.layers.{index}",
        attention(
            config,
            ctx,
            index,
            ropes,
            qkv_bias=bias,
            out_bias=bias,
            scale=config.query_pre_attn_scalar**-0.5,
            window=window_of(config, index),
            softcap=config.attn_logit_softcapping,
        ),
        gated_mlp(config, ctx, index, activation=config.hidden_activation),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )


def embedding_scale(config: PretrainedConfig, ctx: BuildContext) -> float:
    """sqrt(hidden) as the model was trained with it: rounded to the dtype of its weights."""
    return torch.tensor(config.hidden_size**0.5, dtype=ctx.dtype).item()
