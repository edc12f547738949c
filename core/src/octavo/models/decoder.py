"""What all native decoders share: embedding, layers, final norm, head. A model's file says how its layers differ.

Between layers the hidden state travels in two parts, `x` and `residual`, whose sum it is. So the addition at the end
of one block and the norm at the start of the next are one op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from octavo.layers.attention import Attention, AttentionOptions
from octavo.layers.context import BuildContext, StepState
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.linear import Rows
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTables, head_dim_of

Tensor = torch.Tensor


class Layer(Protocol):
    """One decoder layer. x, residual [T, hidden]; residual is None before the first one. Returns both again: without a
    residual if it has been added already."""

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepState) -> tuple[Tensor, Tensor | None]: ...


MakeLayer = Callable[[PretrainedConfig, BuildContext, int, RopeTables], Layer]
"""(config, ctx, index of the layer, rope tables) -> the layer."""


class Decoder:
    """A causal language model over token ids.

    make_layer: builds layer i. unit_offset, float32_norm: of the final norm, see `RMSNorm`.
    embedding_scale: factor on embeddings; logit_scale, softcap: what the head does to its logits.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        ctx: BuildContext,
        *,
        make_layer: MakeLayer,
        float32_norm: bool = False,
        unit_offset: bool = False,
        embedding_scale: float | None = None,
        logit_scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        sizes = (config.vocab_size, config.hidden_size)
        ropes = RopeTables(config, ctx)
        self._embed = VocabEmbedding(ctx, "model.embed_tokens", *sizes, scale=embedding_scale)
        self._layers = [make_layer(config, ctx, i, ropes) for i in range(config.num_hidden_layers)]
        self._norm = RMSNorm(
            ctx,
            "model.norm",
            config.hidden_size,
            config.rms_norm_eps,
            float32_weight=float32_norm,
            unit_offset=unit_offset,
        )
        self._head = LMHead(
            ctx,
            "lm_head",
            *sizes,
            tied_to=self._embed if config.tie_word_embeddings else None,
            scale=logit_scale,
            softcap=softcap,
        )

    def forward(self, token_ids: Tensor, step: StepState) -> Tensor:
        """Token ids [T] -> normed hidden states [T, hidden]."""
        x = self._embed(token_ids)
        residual = None
        for layer in self._layers:
            x, residual = layer(x, residual, step)
        return self._norm(x) if residual is None else self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [N, hidden] -> logits [N, vocab], float32 or as the head gives them."""
        return self._head(hidden)


class PreNormLayer:
    """norm, attention, add; norm, MLP, add: the layer of Llama and most others."""

    def __init__(
        self, ctx: BuildContext, prefix: str, attention: Attention, mlp: GatedMLP, *, width: int, eps: float
    ) -> None:
        self._attention, self._mlp = attention, mlp
        self._input_norm = RMSNorm(ctx, f"{prefix}.input_layernorm", width, eps)
        self._mlp_norm = RMSNorm(ctx, f"{prefix}.post_attention_layernorm", width, eps)

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepState) -> tuple[Tensor, Tensor | None]:
        rows: Rows
        if residual is None:
            rows, residual = self._input_norm(x), x
        else:
            rows, residual = self._input_norm.add_before(self._attention, x, residual)
        rows, residual = self._mlp_norm.add_before(self._mlp, self._attention(rows, step), residual)
        return self._mlp(rows), residual


def attention(
    config: PretrainedConfig,
    ctx: BuildContext,
    index: int,
    ropes: RopeTables,
    *,
    rotate: bool = True,
    **options: Any,
) -> Attention:
    """The self-attention of layer `index`, sizes from the config; `options` are fields of AttentionOptions.

    rotate False: the layer has no position embedding.
    """
    dim = head_dim_of(config)
    settings: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": dim,
        "scale": dim**-0.5,
        "norm_eps": config.rms_norm_eps,
    }
    cos_sin = ropes.table(layer_type(config, index)) if rotate else None
    return Attention(ctx, f"model.layers.{index}.self_attn", AttentionOptions(**(settings | options)), cos_sin=cos_sin)


def gated_mlp(
    config: PretrainedConfig, ctx: BuildContext, index: int, *, activation: str, bias: bool = False, fused: bool = False
) -> GatedMLP:
    """The feed-forward block of layer `index`, sizes from the config."""
    return GatedMLP(
        ctx,
        f"model.layers.{index}.mlp",
        config.hidden_size,
        config.intermediate_size,
        activation=activation,
        bias=bias,
        fused=fused,
    )


def layer_type(config: PretrainedConfig, index: int) -> str:
    """ "full_attention" or "sliding_attention"."""
    types = getattr(config, "layer_types", None)
    return types[index] if types else "full_attention"


def window_of(config: PretrainedConfig, index: int) -> int | None:
    """The sliding window of layer `index`, for models that list the type of every layer."""
    return config.sliding_window if layer_type(config, index) == "sliding_attention" else None
