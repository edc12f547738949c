"""What fp8 costs in quality: the same model with plain weights and cache, and with either or both in fp8, on one text.

    python benchmarks/quality.py [--model FILE.gguf|FOLDER] [--platform cuda] [--dtype bfloat16] [--rows 20] [--json]

A GGUF file (default: the packaged SmolLM2) is dequantized to a plain bfloat16 checkpoint first, since only a plain one
is quantized at load. Everything goes through `octavo.LLM`, one setting after the other:

- teacher-forced: the text (`quality_text.txt`) is one prompt, and every position's distribution is compared with the
  baseline's: the share of positions with the same most likely token, and KL(baseline || setting) in nats. KL is
  computed over the tokens that are among both distributions' TOP likeliest, and one bucket for all others, which is a
  lower bound and close to the whole where that bucket is small (its mean is printed as "rest").
- free-running: greedy answers of NEW_TOKENS tokens to 20 beginnings, --rows at a time: tokens until the first that
  differs from the baseline's (NEW_TOKENS if none does), and how many answers are equal.

"baseline again" is the baseline with prompts cut into chunks of CHUNK tokens and one row at a time: other shapes, so
other kernels and other rounding. It shows how much of the rest is noise. On a platform without fp8 kernels the numbers
are those of core's references: weights rounded per row, activations per token, products in the model's dtype.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import unpack

from octavo import LLM, SamplingParams
from octavo.testing.real_models import smollm2_gguf

TEXT = Path(__file__).with_name("quality_text.txt")
TOP = 512
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 32, 64
CHUNK = 128
FP8_CACHE, FP8_WEIGHTS = {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "baseline": {},
    "baseline again": {"max_num_batched_tokens": CHUNK, "max_num_seqs": 1},
    "fp8 weights": FP8_WEIGHTS,
    "fp8 cache": FP8_CACHE,
    "fp8 weights and cache": {**FP8_WEIGHTS, **FP8_CACHE},
}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """scores: per position the TOP likeliest tokens -> logprob. nll: of the text's own tokens. answers: new tokens."""

    scores: list[dict[int, float]]
    nll: list[float]
    answers: list[list[int]]


def observe(model: Path, tokenizer: Path, setting: Mapping[str, Any], args: argparse.Namespace) -> Observed:
    """Run one setting. Prefix caching is off: a prompt's scores are to come from one pass over it."""
    options: dict[str, Any] = {"max_num_seqs": args.rows, "max_num_batched_tokens": 4096} | dict(setting)
    with LLM(
        str(model),
        tokenizer=str(tokenizer),
        platform=args.platform,
        dtype=args.dtype,
        enforce_eager=args.enforce_eager,
        max_model_len=2560,
        num_kv_blocks=512,
        enable_prefix_caching=False,
        **options,
    ) as llm:
        ids = llm.get_tokenizer().encode(TEXT.read_text())
        score = SamplingParams(max_tokens=0, prompt_logprobs=TOP, detokenize=False)
        rows = llm.generate([ids], score, use_tqdm=False)[0].prompt_logprobs
        assert rows is not None
        starts = [i * (len(ids) - PROMPT_TOKENS) // NUM_PROMPTS for i in range(NUM_PROMPTS)]
        greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([ids[at : at + PROMPT_TOKENS] for at in starts], greedy, use_tqdm=False)
    known = [(token, row) for token, row in zip(ids, rows, strict=True) if row is not None]
    return Observed(
        scores=[{t: entry.logprob for t, entry in row.items() if (entry.rank or 0) <= TOP} for _, row in known],
        nll=[-row[token].logprob for token, row in known],
        answers=[list(output.outputs[0].token_ids) for output in outputs],
    )


def divergence(p: Mapping[int, float], q: Mapping[int, float]) -> tuple[float, float]:
    """(KL(p || q) in nats over the common tokens and one bucket for the others, p's share of that bucket)."""
    common = p.keys() & q.keys()
    total = sum(math.exp(p[token]) * (p[token] - q[token]) for token in common)
    rest_p, rest_q = (max(1.0 - sum(math.exp(x[token]) for token in common), 1e-9) for x in (p, q))
    return max(total + rest_p * (math.log(rest_p) - math.log(rest_q)), 0.0), rest_p


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def compare(base: Observed, other: Observed) -> dict[str, float]:
    """The figures of one setting against the baseline."""
    kls, rests = zip(*(divergence(p, q) for p, q in zip(base.scores, other.scores, strict=True)), strict=True)
    same = [
        max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in zip(base.scores, other.scores, strict=True)
    ]
    until = [first_difference(a, b) for a, b in zip(base.answers, other.answers, strict=True)]
    return {
        "same_next_token": statistics.mean(same),
        "kl_mean": statistics.mean(kls),
        "kl_p99": sorted(kls)[min(len(kls) - 1, int(0.99 * len(kls)))],
        "rest": statistics.mean(rests),
        "perplexity": math.exp(statistics.mean(other.nll)),
        "tokens_until_difference": statistics.mean(until),
        "equal_answers": sum(n == NEW_TOKENS for n in until),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a .gguf file, or a folder of a plain checkpoint")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=NUM_PROMPTS, help="answers generated at once")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON line at the end")
    args = parser.parse_args()
    given = args.model or smollm2_gguf()
    with tempfile.TemporaryDirectory() as scratch:
        model = given if given.is_dir() else unpack(given, Path(scratch))
        found = {name: observe(model, given, setting, args) for name, setting in SETTINGS.items()}
    base = found["baseline"]
    figures = {name: compare(base, observed) for name, observed in found.items()}
    print(f"{given.name}, {args.dtype}, platform {args.platform}: {len(base.nll)} positions, {args.rows} rows at once")
    print(f"{'':22}{'same next':>10}{'KL mean':>10}{'KL p99':>10}{'rest':>8}{'ppl':>9}{'until':>7}{'equal':>7}")
    for name, f in figures.items():
        print(
            f"{name:22}{f['same_next_token']:>10.2%}{f['kl_mean']:>10.5f}{f['kl_p99']:>10.5f}{f['rest']:>8.3f}"
            f"{f['perplexity']:>9.3f}{f['tokens_until_difference']:>7.1f}{f['equal_answers']:>4}/{NUM_PROMPTS}"
        )
    if args.json:
        print(json.dumps({"model": given.name, "dtype": args.dtype, "rows": args.rows, "settings": figures}))


if __name__ == "__main__":
    main()
