"""Phi-3 and Phi-4 (model_type "phi3"): one weight for queries, keys and values, one for gate and up."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.layers.context import BuildContext
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, PreNormLayer, attention, gated_mlp


class Phi3(Decoder):
    """Pre-norm decoder; rotary embedding may cover a part of each head and be scaled by LongRoPE."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=phi3_layer)


def phi3_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PreNormLayer:
    return PreNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, fused=True, window=config.sliding_window),
        gated_mlp(config, ctx, index, activation=config.hidden_act, fused=True),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
