"""Octavo against transformers on the same weights in one run: batch-1 decode and the 64-request mix.

    python benchmarks/offline.py [--requests 64] [--repeats 3] [--model FOLDER] [--json]

Each engine runs alone in a process of its own, one after the other. Without --model the packaged SmolLM2-135M is
dequantized to bfloat16 and both load that. Prints a table of medians and ratios; --json adds one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoint import unpack
from peers import Octavo, Peer, Transformers
from workload import Source, Work

PEERS = ("transformers", "octavo")
MAX_MODEL_LEN = 2304


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Llama-like model; default: the packaged SmolLM2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or unpack("", Path(scratch))
        results = {name: in_own_process(name, model, args) for name in PEERS}
    report(results, args)


def in_own_process(name: str, model: Path, args: argparse.Namespace) -> dict[str, float | str]:
    command = [sys.executable, __file__, "--only", name, "--model", str(model), "--dtype", args.dtype]
    command += ["--threads", str(args.threads), "--requests", str(args.requests), "--repeats", str(args.repeats)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, args: argparse.Namespace) -> dict[str, float | str]:
    """Medians over repeats. Decode speed is what 127 tokens cost beyond the first."""
    peer: Peer
    if name == "octavo":
        peer = Octavo(args.model, dtype=args.dtype, threads=args.threads, max_model_len=MAX_MODEL_LEN)
    else:
        peer = Transformers(args.model, dtype=args.dtype, threads=args.threads)
    source = Source()
    peer.run([source.fixed(64, 8) for _ in range(8)])
    first = [seconds(peer, [source.fixed(128, 1)]) for _ in range(args.repeats)]
    long = [seconds(peer, [source.fixed(128, 128)]) for _ in range(args.repeats)]
    ttft = statistics.median(first)
    prefill = statistics.median(seconds(peer, [source.fixed(2048, 1)]) for _ in range(args.repeats))
    mixes = [source.mix(args.requests) for _ in range(max(1, args.repeats // 2))]
    mix = statistics.median(sum(w.num_output for w in m) / seconds(peer, m) for m in mixes)
    return {
        "version": peer.version,
        "ttft_128_ms": 1e3 * ttft,
        "decode_tok_s": 127 / (statistics.median(long) - ttft),
        "prefill_2048_tok_s": 2048 / prefill,
        "mix_output_tok_s": mix,
    }


def seconds(peer: Peer, work: list[Work]) -> float:
    start = time.perf_counter()
    produced = peer.run(work)
    assert produced == sum(w.num_output for w in work), "an engine gave fewer tokens than asked for"
    return time.perf_counter() - start


def report(results: dict[str, dict[str, float | str]], args: argparse.Namespace) -> None:
    ours, theirs = results["octavo"], results["transformers"]
    print(f"{'':22} {'octavo':>12} {'transformers':>14} {'ratio':>8}")
    ratios = {}
    for key in ("ttft_128_ms", "decode_tok_s", "prefill_2048_tok_s", "mix_output_tok_s"):
        a, b = float(ours[key]), float(theirs[key])
        ratios[key] = b / a if key.endswith("_ms") else a / b
        print(f"{key:22} {a:12.1f} {b:14.1f} {ratios[key]:7.2f}x")
    print(f"{args.dtype}, {args.threads} threads, {args.requests} requests; a ratio above 1 favours octavo")
    if args.json:
        print(json.dumps({"results": results, "ratios": ratios}))


if __name__ == "__main__":
    main()
