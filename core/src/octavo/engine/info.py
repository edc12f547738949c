"""What the API side must know about the model that an engine serves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a loaded model, sent with `Ready`.

    model: what was asked for. served_names: names accepted in a request's `model`, the first one is shown.
    max_model_len: longest prompt plus output, in tokens. vocab_size: of the model (logits), not of the tokenizer.
    eos_token_ids: every token that ends an answer (config, generation_config and tokenizer).
    default_sampling: fields of SamplingParams that generation_config sets (max_new_tokens comes as max_tokens).
    num_kv_blocks, block_size: KV memory, in blocks and tokens a block. max_num_seqs: most sequences in one step.
    logprobs_mode: of requests that do not say. logits_processors: names that `extra_args` may hold.
    """

    model: str
    served_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, float | int] = msgspec.field(default_factory=dict)
    platform: str = ""
    dtype: str = ""
    num_kv_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 1
    logprobs_mode: str = "raw_logprobs"
    logits_processors: tuple[str, ...] = ()

    def with_eos(self, token_ids: Sequence[int]) -> ModelInfo:
        """The same with further end tokens: the tokenizer, which the engine does not load, may know more."""
        known = dict.fromkeys((*self.eos_token_ids, *(t for t in token_ids if t < self.vocab_size)))
        return msgspec.structs.replace(self, eos_token_ids=tuple(known))
