"""Gemma 3, text (model_type "gemma3_text"): Gemma 2 with normed queries and keys, and a rope table per layer type."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.errors import UnsupportedModelError
from octavo.layers.context import BuildContext
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, attention, gated_mlp, window_of
from octavo.models.gemma2 import SandwichLayer, embedding_scale


class Gemma3(Decoder):
    """Sandwich-norm decoder. Raises UnsupportedModelError for a bidirectional (embedding) config."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        if config.use_bidirectional_attention:
            raise UnsupportedModelError("gemma3_text: use_bidirectional_attention is not implemented")
        super().__init__(
            config,
            ctx,
            make_layer=gemma3_layer,
            unit_offset=True,
            embedding_scale=embedding_scale(config, ctx),
            softcap=config.final_logit_softcapping,
        )


def gemma3_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> SandwichLayer:
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
            qk_norm="head",
            unit_offset=True,
        ),
        gated_mlp(config, ctx, index, activation=config.hidden_activation),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
