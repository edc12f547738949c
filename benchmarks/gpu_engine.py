"""The goals for one large GPU, measured through `octavo.LLM` with random weights: greedy, EOS ignored, token ids only.

    python benchmarks/gpu_engine.py [--model llama-8b qwen3-0.6b] [--case start decode_1 ...] [--json] [--profile FILE]

From a checkout without installed distributions:

    export PYTHONPATH=core/src:plugins/cuda/src OCTAVO_EXTRA_PLATFORMS=cuda=octavo_cuda
    python benchmarks/gpu_engine.py

Each model runs in a process of its own, which loads once. `start` is the time from that process's start to its first
token, so it holds imports, weights, kernel compilation and recording of steps. Decode cases: prompts of 128 tokens and
256 outputs; a step is what 255 tokens cost beyond the first. TTFT: one request with one output, nothing cached.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 4096
COMMON = {"dtype": "bfloat16", "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    # Shows that the script runs, on any platform.
    "tiny": {
        "model_type": "qwen3",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "vocab_size": 30720,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Goal:
    """What a case is held against: the hardware's floor, vLLM 0.26 on the same card, our goal. None: not known."""

    floor: float | None
    rival: float | None
    goal: float | None


GOALS: dict[tuple[str, str], Goal] = {
    ("llama-8b", "start_s"): Goal(None, 99.0, 20.0),
    ("llama-8b", "decode_1_ms"): Goal(3.30, 4.96, 3.95),
    ("llama-8b", "decode_64_ms"): Goal(3.6, 6.00, 4.6),
    ("llama-8b", "ttft_128_ms"): Goal(3.5, 11.3, 6.0),
    ("llama-8b", "ttft_2048_ms"): Goal(39.0, 52.7, 46.0),
    ("llama-8b", "throughput_tok_s"): Goal(16000.0, 10652.0, 13000.0),
    ("qwen3-0.6b", "decode_1_ms"): Goal(0.27, 2.38, 0.7),
    ("qwen3-0.6b", "decode_64_ms"): Goal(0.5, 4.07, 1.2),
    ("qwen3-0.6b", "throughput_tok_s"): Goal(None, 13180.0, 45000.0),
}
CASES = ("start", "decode_1", "decode_64", "ttft_128", "ttft_2048", "throughput")

Request = tuple[list[int], int]
"""(prompt token ids, number of output tokens)."""
IDS = (10, 30000)


def skewed(count: int, seed: int = 0) -> list[Request]:
    """Lengths as chat traffic has them: prompts of 32-1024 and outputs of 32-512 tokens, log-uniform. The order of the
    draws is part of the definition, so that every engine is given the same work."""
    source = random.Random(seed)

    def length(low: int, high: int) -> int:
        return int(math.exp(source.uniform(math.log(low), math.log(high))))

    requests = []
    for _ in range(count):
        prompt = [source.randrange(*IDS) for _ in range(length(32, 1024))]
        requests.append((prompt, length(32, 512)))
    return requests


class Fixed:
    """Requests of given lengths; no two prompts are alike."""

    def __init__(self, seed: int = 1) -> None:
        self._source = random.Random(seed)

    def requests(self, num_prompt: int, num_output: int, count: int = 1) -> list[Request]:
        return [([self._source.randrange(*IDS) for _ in range(num_prompt)], num_output) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-8b", "qwen3-0.6b"])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--requests", type=int, default=1000, help="of the throughput case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=JSON", help="engine argument of octavo.LLM")
    parser.add_argument("--cold", action="store_true", help="compile all Triton kernels anew")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line too")
    parser.add_argument("--profile", type=Path, help="write a table of the kernels of decode steps, batch 64")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds a model may take")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.started is not None:
        print(json.dumps(measure(args.model[0], args)), flush=True)
        return
    results = {model: in_own_process(model, args) for model in args.model}
    for model, found in results.items():
        report(model, found)
    if args.json:
        print(json.dumps(results))


def in_own_process(model: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", model, "--case", *args.case, "--platform", args.platform]
    command += ["--requests", str(args.requests), "--repeats", str(args.repeats), "--started", repr(time.time())]
    command += [word for pair in args.arg for word in ("--arg", pair)]
    command += ["--profile", str(args.profile.with_suffix(f".{model}.txt"))] if args.profile else []
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | ({"TRITON_CACHE_DIR": cache} if args.cold else {})
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=args.timeout, check=False, env=environment
        )
    if done.returncode:
        return {"error": f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All cases of one model, in this process. Times in ms (start: s), throughput in output tokens per second."""
    import octavo

    entered = time.time()
    engine_args = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in args.arg)}
    fixed = Fixed()
    found: dict[str, Any] = {"version": octavo.__version__, "arguments": engine_args}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(COMMON | MODELS[model]))
        options = {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False} | engine_args
        llm = octavo.LLM(
            folder, platform=args.platform, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", **options
        )

    def seconds(requests: Sequence[Request]) -> float:
        params = [
            octavo.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        begin = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        taken = time.perf_counter() - begin
        assert [len(o.outputs[0].token_ids) for o in outputs] == [n for _, n in requests], "an output is too short"
        return taken

    def median(requests: Callable[[], Sequence[Request]]) -> float:
        return statistics.median(seconds(requests()) for _ in range(args.repeats))

    with llm:
        built = time.time()
        seconds(fixed.requests(128, 1))
        if "start" in args.case:
            end = time.time()
            parts = {"process": entered - args.started, "engine": built - entered, "first token": end - built}
            found |= {"start_s": end - args.started, "start_parts_s": parts}
        seconds(fixed.requests(128, 8, 8))
        for size in (1, 64):
            if f"decode_{size}" in args.case:
                first = median(lambda size=size: fixed.requests(128, 1, size))  # type: ignore[misc]
                whole = median(lambda size=size: fixed.requests(128, 256, size))  # type: ignore[misc]
                found[f"decode_{size}_ms"] = 1e3 * (whole - first) / 255
        for length in (128, 2048):
            if f"ttft_{length}" in args.case:
                seconds(fixed.requests(length, 1))
                found[f"ttft_{length}_ms"] = 1e3 * median(lambda length=length: fixed.requests(length, 1))  # type: ignore[misc]
        if "throughput" in args.case:
            seconds(skewed(args.requests // 3, seed=1))  # shapes that are recorded at their first use
            work = skewed(args.requests)
            found["throughput_tok_s"] = sum(n for _, n in work) / seconds(work)
            found["throughput_tokens"] = [sum(len(prompt) for prompt, _ in work), sum(n for _, n in work)]
        if args.profile:
            profile(lambda: seconds(fixed.requests(128, 32, 64)), args.profile)
    return found


def profile(run: Callable[[], object], path: Path) -> None:
    """Write which kernels the device's time goes to."""
    import torch

    with torch.profiler.profile() as profiler:
        run()
    averages = profiler.key_averages()
    on_device = any(average.self_device_time_total for average in averages)
    by = "self_device_time_total" if on_device else "self_cpu_time_total"
    path.write_text(averages.table(sort_by=by, row_limit=60, max_name_column_width=100))


def report(model: str, found: dict[str, Any]) -> None:
    print(f"\n{model}: {found.get('error') or 'octavo ' + found['version']} {found.get('arguments') or ''}")
    print(f"{'':20} {'measured':>10} {'floor':>10} {'vLLM 0.26':>10} {'goal':>10}")
    for case, value in found.items():
        if not isinstance(value, float):
            continue
        goal = GOALS.get((model, case), Goal(None, None, None))
        columns = " ".join(f"{'-' if x is None else format(x, '.2f'):>10}" for x in (goal.floor, goal.rival, goal.goal))
        met = ""
        if goal.goal is not None:
            met = "met" if (value >= goal.goal if case.endswith("tok_s") else value <= goal.goal) else "missed"
        print(f"{case:20} {value:10.2f} {columns} {met}")


if __name__ == "__main__":
    main()
