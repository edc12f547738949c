"""What a model is made of, for extensions that bring one (`ExtensionRegistry.model`). Imports torch.

A model is a class `Model(config, ctx)` with `forward` and `logits`; `Decoder` is one whose layers you say. See
docs/adding-a-model.md.
"""

from octavo.layers.attention import Attention, AttentionOptions
from octavo.layers.context import BuildContext, StepState
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.linear import Linear, RowLinear, Shard, share
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RopeTables, head_dim_of
from octavo.models.decoder import Decoder, Layer, PreNormLayer, attention, gated_mlp, layer_type, window_of

__all__ = [
    "Attention",
    "AttentionOptions",
    "BuildContext",
    "Decoder",
    "GatedMLP",
    "LMHead",
    "Layer",
    "Linear",
    "PreNormLayer",
    "RMSNorm",
    "RopeTables",
    "RowLinear",
    "Shard",
    "StepState",
    "VocabEmbedding",
    "attention",
    "gated_mlp",
    "head_dim_of",
    "layer_type",
    "share",
    "window_of",
]
