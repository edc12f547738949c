"""Platforms that compile ahead: every shape of a step before the first request, and what stands beside the steps."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from octavo.plugin.contracts import BatchKey
from octavo.plugin.step import Admit, Batch, BlockUpdate
from octavo.progress import ProgressBar
from octavo.runner.runner import ModelRunner
from octavo.sampling.params import SamplingParams

log = logging.getLogger("octavo.worker")

PLAIN = SamplingParams(temperature=0.0)
ASKED: dict[str, Any] = {
    "allowed_token_ids": (0, 1),
    "bad_words_ids": ((1, 2),),
    "logit_bias": {0: 1.0},
    "repetition_penalty": 1.1,
    "logprobs": 1,
}
SPECIAL = (
    SamplingParams(temperature=0.0, **ASKED),
    SamplingParams(temperature=0.8, min_p=0.01, top_p=0.9, logprobs_mode="processed_logits", **ASKED),
)
"""Between them all that a request can ask for and that works on as many rows as the step has."""


def compile_ahead(runner: ModelRunner, *, show: bool) -> None:
    """Compile all shapes, and serve a made-up step of each. show: with a bar, if there is a terminal."""
    keys = runner.shapes.at_start
    log.info("%d shapes of steps to compile", len(keys))
    begin = time.monotonic()
    with ProgressBar(len(keys), enabled=show, title="Compiling") as bar:
        bar.show()
        for number, key in enumerate(keys, 1):
            start = time.monotonic()
            runner.record(key)
            seconds = time.monotonic() - start
            log.info("compiled %d of %d: %s, %.1f s", number, len(keys), described(key), seconds)
            bar.advance(requests=1)
    for key in runner.shapes.captured:
        for params in (PLAIN, *SPECIAL):
            rehearse(runner, key, params)
    log.info("%d shapes compiled in %.1f s", len(keys), time.monotonic() - begin)


def described(key: BatchKey) -> str:
    """A shape in words."""
    kind = "decode step" if key.max_q_len == 1 else "step with prompts"
    return f"{kind} of {key.num_tokens} tokens in {key.num_seqs} sequences"


def rehearse(runner: ModelRunner, key: BatchKey, params: SamplingParams) -> None:
    """Serve made-up requests that fill a shape as real ones would, in the null block: where shapes are compiled ahead,
    what stands beside the compiled steps is then compiled too, and not while someone waits."""
    limits = runner.shapes.limits
    num_seqs = min(key.num_seqs, key.num_tokens, limits.max_num_seqs)
    counts = np.ones(num_seqs, np.int32)
    counts[-1] = min(key.num_tokens - num_seqs + 1, limits.max_model_len - 1)
    rows, zeros = np.arange(num_seqs, dtype=np.int32), np.zeros(num_seqs, np.int32)
    runner.launch(
        Batch(
            step=0,
            rows=rows,
            starts=zeros,
            counts=counts,
            samples=np.ones(num_seqs, np.bool_),
            admits=[
                Admit(row=row, token_ids=np.zeros(n, np.int32), num_prompt_tokens=n, params=params, seed=0)
                for row, n in enumerate(counts.tolist())
            ],
            blocks=[BlockUpdate(rows=rows, indices=zeros, blocks=zeros) for _ in runner.kv_groups],
        )
    )
    runner.collect()
    for row in rows.tolist():
        runner.sampler.release(row)
