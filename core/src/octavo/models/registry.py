"""Which class serves which model_type, and what a model must offer. Imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from octavo.layers.context import BuildContext, StepState

MODELS = {
    "gemma2": "octavo.models.gemma2:Gemma2",
    "gemma3_text": "octavo.models.gemma3:Gemma3",
    "granite": "octavo.models.granite:Granite",
    "llama": "octavo.models.llama:Llama",
    "mistral": "octavo.models.mistral:Mistral",
    "olmo2": "octavo.models.olmo2:Olmo2",
    "phi3": "octavo.models.phi3:Phi3",
    "qwen2": "octavo.models.qwen2:Qwen2",
    "qwen3": "octavo.models.qwen3:Qwen3",
    "smollm3": "octavo.models.smollm3:SmolLM3",
}
"""The native models: model_type -> "module:Class". `octavo.builtin_extensions` registers them by the hook that a plugin
or an extension uses for its own."""


class Model(Protocol):
    """What the runner needs of a model. Building one declares its weights in `ctx.weights`, for the loader to fill."""

    vocab_size: int
    hidden_size: int

    def __init__(self, config: PretrainedConfig, ctx: BuildContext) -> None: ...

    def forward(self, token_ids: torch.Tensor, step: StepState) -> torch.Tensor:
        """Token ids [T] -> hidden states [T, hidden], after the final norm."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden] -> logits [N, vocab], float32 or as the head gives them."""
        ...
