"""Seed-OSS (model_type "seed_oss"): Llama with a head size of its own, and biases on queries, keys and values."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.plugin.models import BuildContext, Decoder, PreNormLayer, RopeTables, attention, gated_mlp


class SeedOss(Decoder):
    """Pre-norm decoder."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=seed_layer)


def seed_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PreNormLayer:
    biases = {"qkv_bias": config.attention_bias, "out_bias": config.attention_out_bias}
    return PreNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, **biases),
        gated_mlp(config, ctx, index, activation=config.hidden_act, bias=config.mlp_bias),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
