"""How long a stream stands still while others ask for grammars that are hard to compile.

    python benchmarks/structured_gap.py [--model FOLDER] [--seconds 8]

One plain stream runs in a real engine process, alone first, then with each kind of hard request beside it, one after
the other without a pause. Prints the longest wait between two of its deltas, and what became of the requests, as a
table. The grammar process is started before anything is measured. On a busy machine look at the difference to "alone".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from octavo.config import make_config
from octavo.engine.client import EngineClient
from octavo.engine.process import start_engine
from octavo.errors import OctavoError
from octavo.sampling.params import SamplingParams
from octavo.structured.spec import StructuredOutputs
from octavo.testing.tiny import make_model

HARD: dict[str, StructuredOutputs] = {
    "nested repeats": StructuredOutputs(regex="(((a{1,60}b?){1,60}c?){1,60}d?){1,60}"),
    "long repeats": StructuredOutputs(regex="([a-z]{0,2000} ?){0,50}"),
    "large enum": StructuredOutputs(json={"enum": [f"value {number * 7919}" for number in range(20_000)]}),
    "large object": StructuredOutputs(
        json={"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}}
    ),
    "left recursion": StructuredOutputs(
        grammar="\n".join(
            ["root ::= " + " | ".join(f"root root{n}" for n in range(50))]
            + [f'root{n} ::= root | "{n}"' for n in range(50)]
        )
    ),
    "deep references": StructuredOutputs(
        json={
            "$ref": "#/$defs/n0",
            "$defs": {
                f"n{n}": {
                    "anyOf": [{"$ref": f"#/$defs/n{(n * 7 + k) % 60}"} for k in range(4)]
                    + [{"type": "array", "items": {"$ref": "#"}}]
                }
                for n in range(60)
            },
        }
    ),
    "no regex": StructuredOutputs(regex="(" * 3000),
}


async def longest_gap(client: EngineClient, seconds: float) -> float:
    """Of one stream, in seconds, over that time."""
    longest, began = 0.0, time.perf_counter()
    last = None
    while time.perf_counter() - began < seconds:
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        async for _ in client.generate([5, 6, 7], params, request_id="plain"):
            now = time.perf_counter()
            if last is not None:
                longest = max(longest, now - last)
            last = now
        last = None  # a new request waits for its first token
    return longest


async def ask_for(client: EngineClient, spec: StructuredOutputs, outcomes: Counter[str], stop: asyncio.Event) -> None:
    """Requests of this shape, one after the other. Each is new to the cache."""
    number = 0
    while not stop.is_set():
        number += 1
        fresh = spec
        if spec.regex is not None:
            fresh = StructuredOutputs(
                regex=spec.regex.replace("a", f"a{{0,{number}}}", 1) if number > 1 else spec.regex
            )
        try:
            async for _ in client.generate([5], SamplingParams(max_tokens=4, structured_outputs=fresh), request_id="x"):
                pass
            outcomes["served"] += 1
        except OctavoError as error:
            outcomes[f"{type(error).__name__}: {str(error)[:60]}"] += 1


async def measure(model: str, seconds: float) -> None:
    handle = await start_engine(make_config(model=model, max_num_seqs=16, structured_outputs_timeout=2.0))
    client = await EngineClient.connect(handle)
    try:
        warm = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs(choice=("a", "b")))
        async for _ in client.generate([5], warm, request_id="warm"):
            pass
        gaps = {"alone": (await longest_gap(client, seconds), Counter[str]())}
        for name, spec in HARD.items():
            stop, outcomes = asyncio.Event(), Counter[str]()
            other = asyncio.create_task(ask_for(client, spec, outcomes, stop))
            gaps[name] = await longest_gap(client, seconds), outcomes
            stop.set()
            await other
    finally:
        await client.shutdown()
    print(f"{'beside':18} {'longest gap':>12}  outcomes")
    for name, (gap, outcomes) in gaps.items():
        print(f"{name:18} {gap * 1e3:9.1f} ms  {dict(outcomes)}")
    print(json.dumps({name: round(gap * 1e3, 1) for name, (gap, _) in gaps.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a tiny random model if left out")
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(make_model(Path(folder) / "model", "qwen3", seed=1))
        asyncio.run(measure(model, args.seconds))


if __name__ == "__main__":
    main()
