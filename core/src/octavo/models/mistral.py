"""Mistral (model_type "mistral"): Llama with one sliding window for all layers, and no biases."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.layers.context import BuildContext
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, PreNormLayer, attention, gated_mlp


class Mistral(Decoder):
    """Pre-norm decoder; `sliding_window` None means full attention."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=mistral_layer)


def mistral_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PreNormLayer:
    return PreNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, window=config.sliding_window),
        gated_mlp(config, ctx, index, activation=config.hidden_act),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
