"""What serving costs: tokens a second through HTTP streams, against `LLM.generate` on the same work, in one run.

    python benchmarks/serving.py [--model MODEL] [--streams 64] [--rounds 2] [--json]

Each round answers the same work offline, then through a server with that many streaming clients; both start anew, so
nothing is cached. The clients run in this process and share the machine with the server. Also: what a stream adds to a
token. The time of an engine step is taken offline, from full batches without prompts; what a gap between two tokens of
a stream has beyond it was added by the server, HTTP, and the client.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from octavo.bench.offline import answer, measure_throughput
from octavo.bench.serve import COMPLETIONS, first_model, replay, request_bodies, warm_up
from octavo.bench.sse_client import Answer, Client
from octavo.bench.workload import WARMUP_LENGTHS, WARMUP_SEED, Source, Work, ids_within
from octavo.llm import LLM
from octavo.weights.demo import demo_model

PROMPT = 64
STARTS_S = 180.0
PERCENTILES = (50, 90, 99)


def work_of(streams: int, output: int, vocab_size: int, seed: int) -> list[Work]:
    source = Source(seed, ids=ids_within(vocab_size))
    return [source.fixed(PROMPT, output) for _ in range(streams)]


def offline(model: str, platform: str, streams: int, output: int, seed: int) -> tuple[float, float, int]:
    """(output tokens a second, seconds of a decode step of a full batch, vocabulary)."""
    with LLM(model, platform=platform, max_num_seqs=streams, max_model_len=1024) as llm:
        vocab = llm.info.vocab_size
        figures = measure_throughput(llm, work_of(streams, output, vocab, seed), num_warmups=4)
        source = Source(WARMUP_SEED + 1, ids=ids_within(vocab))
        short, long = ([source.fixed(PROMPT, n) for _ in range(streams)] for n in (1, output))
        step = (answer(llm, long, detokenize=True)[0] - answer(llm, short, detokenize=True)[0]) / (output - 1)
    return figures["output_throughput"], step, vocab


@contextmanager
def server(model: str, platform: str, streams: int) -> Iterator[str]:
    """A server process; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--platform", platform, "--port", str(port), "--max-num-seqs", str(streams), "--max-model-len", "1024"]
    command = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", model, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit("the server did not start; its messages are above")
                time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def served(url: str, work: list[Work], vocab: int) -> tuple[float, list[Answer]]:
    """(output tokens a second, answers) of all the work at once."""
    client, name = Client(url + COMPLETIONS), first_model(url)
    source = Source(WARMUP_SEED, ids=ids_within(vocab))
    first = request_bodies([source.fixed(*WARMUP_LENGTHS) for _ in range(4)], endpoint=COMPLETIONS, model=name)
    # A request with a shape is answered once the server's grammar process, which starts behind it, is loaded.
    shaped = {"model": name, "prompt": "x", "stream": True, "structured_outputs": {"choice": ["y"]}}
    first.append(json.dumps(shaped).encode())
    bodies = request_bodies(work, endpoint=COMPLETIONS, model=name, ignore_eos=True)
    # This process holds a torch and what is left of an engine: collecting among them would stop all streams at once.
    gc.collect()
    gc.freeze()

    async def run() -> tuple[list[Answer], float]:
        await warm_up(client, first)
        answers, duration = await replay(client, bodies, [0.0] * len(bodies))
        client.close()
        return answers, duration

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers, duration = runner.run(run())
    pairs = zip(answers, work, strict=True)
    wrong = [a.error or f"{a.num_output} tokens" for a, w in pairs if a.error or a.num_output != w.num_output]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(answers)} streams went wrong: {wrong[0]}")
    return sum(a.num_output for a in answers) / duration, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON line at the end")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = args.model or str(demo_model())
    rounds: list[dict[str, Any]] = []
    for seed in range(args.rounds):
        alone, step, vocab = offline(model, args.platform, args.streams, args.output_len, seed)
        print(f"round {seed}: offline {alone:.1f} tok/s, a step takes {step * 1e3:.1f} ms", flush=True)
        with server(model, args.platform, args.streams) as url:
            rate, answers = served(url, work_of(args.streams, args.output_len, vocab, seed), vocab)
        # The second half of each stream: no prompt is being read any more, so every step is one of a full batch.
        gaps = np.concatenate([np.diff(a.arrivals[args.output_len // 2 :]) for a in answers]) - step
        added = {f"p{p}": float(np.percentile(gaps, p) * 1e3) for p in PERCENTILES}
        rounds.append(
            {"offline": alone, "served": rate, "ratio": rate / alone, "step_ms": step * 1e3, "added_ms": added}
        )
        late = ", ".join(f"{name} {value:.1f}" for name, value in added.items())
        print(
            f"         {args.streams} streams {rate:.1f} tok/s, ratio {rate / alone:.3f}; added to a token, ms: {late}"
        )
    ratio = statistics.median(r["ratio"] for r in rounds)
    print(f"{Path(model).name}: served / offline {ratio:.3f} (median of {len(rounds)})")
    if args.json:
        print(json.dumps({"model": Path(model).name, "streams": args.streams, "ratio": ratio, "rounds": rounds}))


if __name__ == "__main__":
    main()
