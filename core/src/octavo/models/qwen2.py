"""Qwen2 and Qwen2.5 (model_type "qwen2"): Llama with biases on queries, keys and values; some layers may slide."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.layers.context import BuildContext
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, PreNormLayer, attention, gated_mlp, window_of


class Qwen2(Decoder):
    """Pre-norm decoder."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=qwen2_layer)


def qwen2_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PreNormLayer:
    return PreNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, qkv_bias=True, window=window_of(config, index)),
        gated_mlp(config, ctx, index, activation=config.hidden_act),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
