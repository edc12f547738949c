"""Tables of cosines and sines for rotary position embedding, for every scaling rule that transformers knows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import UnsupportedModelError
from octavo.layers.context import BuildContext

Tensor = torch.Tensor


def head_dim_of(config: PretrainedConfig) -> int:
    """Size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class RopeTables:
    """The tables of one model: one, or one per layer type where the config says so (Gemma 3). Layers share them.

    Rules that depend on the sequence length ("dynamic", "longrope") are resolved once, for the longest sequence that
    the engine serves: keys in the cache are already rotated, so a table cannot change under a running sequence.
    """

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None:
        self._config, self._ctx = config, ctx
        self._tables: dict[str | None, Tensor] = {}

    def table(self, layer_type: str | None = None) -> Tensor:
        """cos_sin [max_model_len, R] in the model's dtype: R / 2 cosines, then R / 2 sines (see `octavo.ops.rope`)."""
        nested = layer_type if layer_type in self._config.rope_parameters else None
        if nested not in self._tables:
            self._tables[nested] = self._make(nested)
        return self._tables[nested]

    def _make(self, layer_type: str | None) -> Tensor:
        length = self._ctx.limits.max_model_len
        inv_freq, factor = frequencies(self._config, max_model_len=length, layer_type=layer_type)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq
        table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        return table.to(device=self._ctx.torch_device, dtype=self._ctx.dtype)


def frequencies(config: PretrainedConfig, *, max_model_len: int, layer_type: str | None = None) -> tuple[Tensor, float]:
    """Radians per position [R / 2] (float32), and the factor on cosines and sines.

    `freq_factors` in the rope parameters, one number per frequency, divides them (as GGUF's rope_freqs tensor does).
    Raises UnsupportedModelError for an unknown rope_type or freq_factors of the wrong length.
    """
    params: dict[str, Any] = config.rope_parameters
    if layer_type is not None:
        params = params[layer_type]
    kind = params.get("rope_type", "default")
    if kind == "default":
        size = int(head_dim_of(config) * params.get("partial_rotary_factor", 1.0))
        inv_freq = 1.0 / params["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        factor = 1.0
    elif kind in ROPE_INIT_FUNCTIONS:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](
            config, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
        )
    else:
        known = ", ".join(sorted(("default", *ROPE_INIT_FUNCTIONS)))
        raise UnsupportedModelError(f"rope_type {kind!r} in the model's config is not implemented; known: {known}")
    if divisors := params.get("freq_factors"):
        if len(divisors) != len(inv_freq):
            raise UnsupportedModelError(
                f"freq_factors holds {len(divisors)} numbers, the model has {len(inv_freq)} rotary frequencies"
            )
        inv_freq = inv_freq / torch.tensor(divisors, dtype=torch.float32)
    return inv_freq, factor
