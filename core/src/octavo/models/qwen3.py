"""Qwen3 (model_type "qwen3"): pre-norm decoder whose queries and keys are normed head by head."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.layers.context import BuildContext
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, PreNormLayer, attention, gated_mlp, window_of


class Qwen3(Decoder):
    """Pre-norm decoder."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=qwen3_layer)


def qwen3_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PreNormLayer:
    bias = config.attention_bias
    return PreNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(
            config,
            ctx,
            index,
            ropes,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            window=window_of(config, index),
        ),
        gated_mlp(config, ctx, index, activation=config.hidden_act),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
