"""OLMo 2 (model_type "olmo2"): norms after attention and MLP instead of before, and over all queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from octavo.layers.attention import Attention
from octavo.layers.context import BuildContext, StepState
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTables
from octavo.models.decoder import Decoder, attention, gated_mlp

Tensor = torch.Tensor


class Olmo2(Decoder):
    """Post-norm decoder."""

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, make_layer=olmo2_layer, float32_norm=True)


class PostNormLayer:
    """attention, norm, add; MLP, norm, add."""

    def __init__(
        self, ctx: BuildContext, prefix: str, attention: Attention, mlp: GatedMLP, *, width: int, eps: float
    ) -> None:
        self._attention, self._mlp = attention, mlp
        self._add: Callable[..., Tensor] = ctx.op("scaled_add", size=width)
        self._attention_norm, self._mlp_norm = (
            RMSNorm(ctx, f"{prefix}.{name}_layernorm", width, eps, float32_weight=True)
            for name in ("post_attention", "post_feedforward")
        )

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepState) -> tuple[Tensor, None]:
        assert residual is None, "every layer adds its own"
        x = self._add(self._attention_norm(self._attention(x, step)), x)
        return self._add(self._mlp_norm(self._mlp(x)), x), None


def olmo2_layer(config: PretrainedConfig, ctx: BuildContext, index: int, ropes: RopeTables) -> PostNormLayer:
    bias = config.attention_bias
    return PostNormLayer(
        ctx,
        f"model.layers.{index}",
        attention(config, ctx, index, ropes, qkv_bias=bias, out_bias=bias, qk_norm="row", float32_norm=True),
        gated_mlp(config, ctx, index, activation=config.hidden_act),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
    )
