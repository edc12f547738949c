"""The config class of each model_type: Transformers' own, but for one that is slow to import.

What looks at every architecture that Transformers knows takes a quarter of a second: it is imported where it is used.
"""

# Annotations are not postponed here: `strict` checks values against them.

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig


@strict
class LlamaConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Field by field the class of that name in Transformers (5.24), which checks one of them with a helper that imports
    torchvision, FSDP, sympy and in places torch._dynamo: seconds of every start. A test compares the two."""

    model_type = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    def validate_architecture(self) -> None:
        """Called by `strict`."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )


OWN: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig}


def config_class(model_type: str) -> type[PretrainedConfig]:
    """The class for a model_type. Raises KeyError for one that Transformers does not know."""
    if model_type in OWN:
        return OWN[model_type]
    from transformers import CONFIG_MAPPING

    found: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
    return found
