"""Granite (model_type "granite"): Llama with four multipliers: on embeddings, attention, residuals and logits."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from octavo.layers.context import BuildContext, StepState
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, PreNormLayer, attention, gated_mlp

Tensor = torch.Tensor


class Granite(Decoder):
    """Pre-norm decoder with multipliers."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(
            config,
            ctx,
            make_layer=granite_layer,
            embedding_scale=config.embedding_multiplier,
            logit_scale=1.0 / config.logits_scaling,
        )


class GraniteLayer(PreNormLayer):
    """What attention and MLP give is multiplied before it joins the residual."""

    residual_multiplier: float = 1.0

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepState) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self._input_norm(x), x
        else:
            x, residual = self._input_norm.add(x, residual)
        x, residual = self._mlp_norm.add(self._attention(x, step) * self.residual_multiplier, residual)
        return self._mlp(x) * self.residual_multiplier, residual


def granite_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> GraniteLayer:
    bias = config.attention_bias
    scale = config.attention_multiplier
    layer = GraniteLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, qkv_bias=bias, out_bias=bias, scale=scale),
        gated_mlp(config, ctx, index, activation=config.hidden_act, bias=config.mlp_bias),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
    layer.residual_multiplier = config.residual_multiplier
    return layer
