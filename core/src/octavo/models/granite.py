"""Granite (model_type "granite"): Llama with four multipliers: on embeddings, attention, residuals and logits."""

from __future__ import annotations

from collections.abc import Callable

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
    """What attention and MLP give is multiplied before it joins the residual.

    multiplier: by so much. add: the op `scaled_add`.
    """

    multiplier: float
    add: Callable[..., Tensor]

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepState) -> tuple[Tensor, None]:
        assert residual is None, "every layer adds its own"
        x = self.add(self._attention(self._input_norm(x), step), x, self.multiplier)
        return self.add(self._mlp(self._mlp_norm(x)), x, self.multiplier), None


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
    layer.multiplier = config.residual_multiplier
    layer.add = ctx.op("scaled_add", size=config.hidden_size)
    return layer
