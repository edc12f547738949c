"""Tiny random models and tokenizers, made on the fly: enough for every test that needs no trained weights.

folder = make_model(tmp_path, "qwen3", seed=1)      # config, safetensors, generation config, tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from octavo.errors import UnsupportedModelError

BOS, IM_START, IM_END = "<|bos|>", "<|im_start|>", "<|im_end|>"
"""The special tokens, ids 0, 1 and 2. `<|im_end|>` is EOS."""

DEFAULT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat template of a tiny model (ChatML)."""

TEXT = """
A sheet of paper folded three times gives eight leaves, which is an octavo: sixteen pages, and each one is small.
The printer set the letters by hand, inked the form, and pulled the bar. Then the sheets were hung up to dry.
"How many pages are in this book?" asked the child. "Count the sheets, then multiply by sixteen," said the binder.
In the beginning there were 12 sheets; by the end of the week there were 345, and on Monday they had 6,789 more.
def fold(sheet, times): return [sheet] * 2 ** times
for page in range(16): print(f"page {page + 1} of {16}")
{"name": "octavo", "size": 16, "tags": ["paper", "book", "print"], "bound": true}
What is the capital of France? The capital of France is Paris. What is the capital of Japan? It is Tokyo.
Please write a short story about a dog and a cat who travel around the world and meet other animals there.
Once upon a time, there was a little girl who lived in a house near the forest with her mother and her father.
Die Buchbinderin zählt die Bögen. Le relieur compte les feuilles. El libro tiene muchas páginas. Привет, мир!
The weather today is nice, and the answer to the question is that nothing would have been better than the other.
"""


def make_tokenizer(
    folder: Path, *, vocab_size: int = 384, chat_template: str | None = DEFAULT, bos: bool = False
) -> None:
    """Train a byte-level BPE of exactly `vocab_size` ids and write tokenizer.json and tokenizer_config.json.

    bos: whether `<|bos|>` is declared as BOS and put before every text; otherwise the tokenizer has no BOS.
    Raises ValueError for a vocab_size that the built-in text cannot give (it gives 259 to about 670).
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} cannot be trained: got {tokenizer.get_vocab_size()} tokens")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": IM_END,
        "clean_up_tokenization_spaces": False,
    }
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
        settings["bos_token"] = BOS
    if chat_template is not None:
        settings["chat_template"] = chat_template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def tiny_config(model_type: str = "llama", **overrides: Any) -> PretrainedConfig:
    """A config of `model_type` with 2 layers, hidden size 64 and vocabulary 384, and `overrides` on top.

    Keys of the recipe that the config class does not have are left out; an override is always passed on.
    """
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers has no model type {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    num_layers = overrides.get("num_hidden_layers", 2)
    recipe: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 2,
        # Tied embeddings make random models repeat their last token for ever.
        "tie_word_embeddings": False,
        "no_rope_layer_interval": 2,
        "query_pre_attn_scalar": 16,
        # MoE
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    if getattr(default, "sliding_window", None):
        recipe["sliding_window"] = 8
    if len(set(getattr(default, "layer_types", None) or ())) > 1:
        kinds = list(dict.fromkeys(default.layer_types))
        recipe["layer_types"] = [kinds[i % len(kinds)] for i in range(num_layers)]
    settable = {key: value for key, value in recipe.items() if _settable(default, key)}
    return config_class(**(settable | overrides))


def make_model(
    folder: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random model of `tiny_config(model_type, **overrides)` to `folder` as safetensors and return `folder`.

    Weights are larger than a training recipe would have them, so that logits are well apart and greedy output
    varies. The same seed gives the same weights.
    """
    config = tiny_config(model_type, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomize(model, seed=seed)
    model.to(dtype)
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if tokenizer:
        make_tokenizer(folder, vocab_size=config.vocab_size)
    return folder


@torch.no_grad()
def randomize(model: torch.nn.Module, *, seed: int = 0, std: float = 0.15) -> None:
    """Redraw matrices from N(0, std); move vectors (norms, biases) by N(0, 0.1) from where they are."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * std)
        else:
            parameter.add_(noise * 0.1)


def _settable(config: PretrainedConfig, key: str) -> bool:
    """Whether the config has the key and it is not a read-only property."""
    declared = getattr(type(config), key, None)
    if isinstance(declared, property) and declared.fset is None:
        return False
    return hasattr(config, key)
