"""One engine, one model, all tests, in this process: prints what it measures and writes it as JSON.

    python benchmarks/peers/run.py ENGINE --model PATH --work work.json --out result.json [--tests ABCD]

The README beside this file says what the tests are and how to prepare the models, the work and each engine's
environment. Needs nothing but the engine: `compare.py` starts it with that engine's own Python.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from engines import ENGINES, Engine, Request
from meter import Patience, Sample, exclusively, measure, peak_resident_bytes, seconds_since_process_start

MIB = 2**20


def main() -> None:
    before_main = seconds_since_process_start()
    args = arguments()
    work = json.loads(args.work.read_text())
    patience = Patience(max_foreign=args.max_foreign, retries=args.retries, wait_s=args.wait)
    # Starting is test D: nothing of the engine may be imported before the machine is ours.
    with exclusively(args.lock):
        start = time.perf_counter()
        engine = ENGINES[args.engine](args)
        engine.run([request(work["first"])])
        started = before_main + time.perf_counter() - start
    result: dict[str, Any] = {
        "engine": args.engine,
        "version": engine.version,
        "model": args.model.name,
        "threads": args.threads,
        "options": args.option,
        "start_s": round(started, 2),
        "resident_after_start_mib": peak_resident_bytes() // MIB,
        "samples": {},
    }
    tell(result, "D", start_s=result["start_s"])
    try:
        for test in args.tests:
            if test != "D":
                with exclusively(args.lock):
                    figures, samples = TESTS[test](engine, work, args, patience)
                result["samples"][test] = {name: [s.as_dict() for s in found] for name, found in samples.items()}
                result |= figures
                tell(result, test, **figures)
            result["peak_resident_mib"] = peak_resident_bytes() // MIB
            args.out.write_text(json.dumps(result, indent=1))
    finally:
        engine.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="the file that work.py writes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tests", default="ABCD", help="letters; D (the start) is always measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mixes", type=int, default=1, help="how many different mixes test B runs")
    parser.add_argument("--requests", type=int, default=64, help="test B takes the first N requests of a mix")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-gib", type=float, default=2.0, help="memory for the KV cache, where an engine asks")
    parser.add_argument("--server", help="llamacpp: a llama-server program instead of the package xllamacpp")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="the engine's own settings")
    parser.add_argument("--lock", type=Path, help="a file to lock exclusively during each test")
    parser.add_argument("--max-foreign", type=float, default=0.04, help="the share of others that spoils a sample")
    parser.add_argument("--retries", type=int, default=2, help="how often a spoilt sample is repeated")
    parser.add_argument("--wait", type=float, default=30.0, help="most seconds to wait for a quiet machine")
    return parser.parse_args()


def request(entry: list[Any]) -> Request:
    return Request(*entry)


def decode(engine: Engine, work: Any, args: argparse.Namespace, patience: Patience) -> Any:
    """A: alone, 128 prompt tokens; 1 and 128 output tokens in turn."""
    prompts: Iterator[list[int]] = iter(work["short"])
    run(engine, [Request(next(prompts), 16)])
    first, long = [], []
    for _ in range(args.repeats):
        one, many = Request(next(prompts), 1), Request(next(prompts), 128)
        first.append(measure(partial(run, engine, [one]), patience))
        long.append(measure(partial(run, engine, [many]), patience))
    ttft = median(first)
    rate = 127 / (median(long) - ttft)
    return {"ttft_128_ms": round(1e3 * ttft, 1), "decode_tok_s": round(rate, 2)}, {"first": first, "long": long}


def mix(engine: Engine, work: Any, args: argparse.Namespace, patience: Patience) -> Any:
    """B: many requests at once."""
    run(engine, [Request(prompt, 8) for prompt in work["warm"]])
    samples, counts = [], []
    for each in work["mixes"][: args.mixes]:
        requests = [request(entry) for entry in each[: args.requests]]
        counts.append(sum(r.num_output for r in requests))
        samples.append(measure(partial(run, engine, requests), patience))
    rates = [count / sample.seconds for count, sample in zip(counts, samples, strict=True)]
    figures = {"mix_output_tok_s": round(statistics.median(rates), 1), "mix_requests": args.requests}
    return figures, {"mix": samples}


def prefill(engine: Engine, work: Any, args: argparse.Namespace, patience: Patience) -> Any:
    """C: one prompt of 2,048 tokens, 1 output token."""
    prompts = itertools.cycle(work["long"])
    run(engine, [Request(next(prompts), 1)])
    samples = []
    for _ in range(args.repeats):
        one = Request(next(prompts), 1)
        samples.append(measure(partial(run, engine, [one]), patience))
    return {"prefill_2048_tok_s": round(2048 / median(samples), 1)}, {"prefill": samples}


TESTS = {"A": decode, "B": mix, "C": prefill}


def run(engine: Engine, requests: list[Request]) -> int:
    produced = engine.run(requests)
    wanted = sum(r.num_output for r in requests)
    assert produced == wanted, f"{produced} tokens came, {wanted} were asked for"
    return produced


def median(samples: list[Sample]) -> float:
    return statistics.median(sample.seconds for sample in samples)


def tell(result: dict[str, Any], test: str, **figures: float) -> None:
    worst = max((s["foreign"] for found in result["samples"].get(test, {}).values() for s in found), default=0.0)
    said = ", ".join(f"{name} {value}" for name, value in figures.items())
    print(f"{result['engine']} {result['model']} {test}: {said} (others took at most {worst:.1%})", flush=True)


if __name__ == "__main__":
    main()
