"""Llama (model_type "llama"): Llama 2 and 3, SmolLM2, and the many that share their config."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.layers.context import BuildContext
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, PreNormLayer, attention, gated_mlp


class Llama(Decoder):
    """Pre-norm decoder with grouped-query attention and a gated MLP."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=llama_layer)


def llama_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PreNormLayer:
    bias = config.attention_bias
    return PreNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, qkv_bias=bias, out_bias=bias),
        gated_mlp(config, ctx, index, activation=config.hidden_act, bias=config.mlp_bias),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
