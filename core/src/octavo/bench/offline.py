"""Offline measurements: an `LLM` of this process answers seeded work, greedily and to exact lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.bench.workload import WARMUP_LENGTHS, WARMUP_SEED, Source, Work, ids_within
from octavo.errors import EngineError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling.params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def measure_latency(
    llm: LLM,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    num_iters: int,
    num_iters_warmup: int,
    seed: int = 0,
    detokenize: bool = True,
    on_iteration: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds that one batch takes from submitting it to its last token. Each iteration has new prompts.

    Raises RequestError when the lengths do not fit the model.
    """
    latencies: list[float] = []
    for prompts_seed, count in ((WARMUP_SEED, num_iters_warmup), (seed, num_iters)):
        source = Source(prompts_seed, ids=ids_within(llm.info.vocab_size))
        latencies = []
        for _ in range(count):
            batch = [source.fixed(input_len, output_len) for _ in range(batch_size)]
            latencies.append(answer(llm, batch, detokenize=detokenize)[0])
            on_iteration()
    average = float(np.mean(latencies))
    return {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
        "output_throughput": batch_size * output_len / average,
    }


def measure_throughput(
    llm: LLM, work: Sequence[Work], *, num_warmups: int = 0, detokenize: bool = True, show_progress: bool = False
) -> dict[str, Any]:
    """Requests and tokens a second when all of the work is there from the beginning.

    num_warmups: short requests answered before the clock starts, for what a platform compiles on first use.
    Raises RequestError when a request does not fit the model.
    """
    if num_warmups:
        source = Source(WARMUP_SEED, ids=ids_within(llm.info.vocab_size))
        answer(llm, [source.fixed(*WARMUP_LENGTHS) for _ in range(num_warmups)], detokenize=detokenize)
    elapsed, outputs = answer(llm, work, detokenize=detokenize, show_progress=show_progress)
    num_input = sum(len(w.prompt) for w in work)
    num_output = sum(w.num_output for w in work)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(work),
        "total_num_tokens": num_input + num_output,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "requests_per_second": len(work) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "output_throughput": num_output / elapsed,
    }


def answer(
    llm: LLM, work: Sequence[Work], *, detokenize: bool, show_progress: bool = False
) -> tuple[float, list[RequestOutput]]:
    """(seconds, outputs). Raises EngineError if the engine gave another number of tokens than was asked for."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=w.num_output, ignore_eos=True, detokenize=detokenize) for w in work
    ]
    prompts = [w.prompt for w in work]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=show_progress)
    elapsed = time.perf_counter() - started
    for index, (output, one) in enumerate(zip(outputs, work, strict=True)):
        num_got = len(output.outputs[0].token_ids)
        if num_got != one.num_output:
            # A rate over tokens that were never made would be wrong, so there is none.
            raise EngineError(f"request {index} was answered with {num_got} tokens instead of {one.num_output}")
    return elapsed, outputs
