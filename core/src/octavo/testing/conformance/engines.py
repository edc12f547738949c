"""Small engines on the platform under test, for whatever serves requests."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.ops.bind import REFERENCE
from octavo.plugin import MultipleOf
from octavo.testing.conformance.subject import Subject

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
MAX_MODEL_LEN = 160

GAP = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.4}
"""How far below the likeliest token, in logits, a greedy choice may lie: rounding flips near ties."""


def prompts() -> list[list[int]]:
    """Token ids: one token, shared beginnings, lengths around a block's and beyond a step's."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 380, (40,), generator=generator).tolist()
    tails = [torch.randint(3, 380, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 33)]
    return [[17], shared + tails[0], shared + tails[1], tails[2], tails[3], shared + tails[4]]


def dtype_of(subject: Subject) -> str:
    """The dtype that shows differences best."""
    return "float32" if "float32" in subject.caps.dtypes else subject.caps.default_dtype


def block_size_of(subject: Subject) -> int:
    """A KV block size that the platform claims: the least that is not below 16, where it has the choice."""
    rule = subject.caps.schedule.block_sizes[0]
    return -(-16 // rule.value) * rule.value if isinstance(rule, MultipleOf) else rule


def engine(subject: Subject, folder: Path, **settings: Any) -> LLM:
    """A small engine on the platform; `settings` are those of LLM and win over the usual ones."""
    block = block_size_of(subject)
    base: dict[str, Any] = {
        "platform": subject.name,
        "dtype": dtype_of(subject),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        # Where each shape is a program to compile for every engine, few and small ones.
        "max_num_batched_tokens": 32 if subject.caps.graph == "aot" else 256,
        "num_kv_blocks": 1 + 8 * -(-MAX_MODEL_LEN // block),
        "block_size": block,
        "skip_tokenizer_init": True,
    }
    return LLM(str(folder), **(base | settings))


def reference_kernels(subject: Subject) -> tuple[tuple[str, str], ...]:
    """The setting `kernels` with which core's references serve what the platform, or a pack, has kernels for."""
    families = [family for family in ("attention", "linear") if subject.kernels.classes(family)]
    ops = sorted({kernel.what for kernel in subject.ops() if kernel.provider != REFERENCE})
    return tuple((name, REFERENCE) for name in [*families, *ops])


def tokens(llm: LLM, asked: list[list[int]], params: Any) -> list[list[int]]:
    """Generated ids of every prompt; the engine is closed."""
    with llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
    gc.collect()
    return [output.outputs[0].token_ids for output in outputs]


def assert_likeliest(subject: Subject, folder: Path, asked: list[list[int]], answers: list[list[int]]) -> None:
    """Every generated token of greedy answers is the likeliest by transformers' own model in float32, or nearly."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for prompt, generated in zip(asked, answers, strict=True):
        assert len(generated) == GREEDY.max_tokens
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        gap = logits.amax(-1) - logits.gather(-1, torch.tensor(generated)[:, None])[:, 0]
        assert gap.max() <= GAP[dtype_of(subject)], f"a token lies {gap.max():.4f} below the likeliest"
