"""SmolLM3 (model_type "smollm3"): Llama with some layers that have no position embedding (NoPE)."""

from __future__ import annotations

from transformers import PretrainedConfig

from octavo.layers.context import BuildContext
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, PreNormLayer, attention, gated_mlp, window_of


class SmolLM3(Decoder):
    """Pre-norm decoder; `no_rope_layers[i]` is 1 where layer i rotates (the name says the opposite)."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=smollm3_layer)


def smollm3_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PreNormLayer:
    bias = config.attention_bias
    window = window_of(config, index) if config.use_sliding_window else None
    rotate = bool(config.no_rope_layers[index])
    return PreNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, qkv_bias=bias, out_bias=bias, window=window, rotate=rotate),
        gated_mlp(config, ctx, index, activation=config.hidden_act, bias=config.mlp_bias),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
