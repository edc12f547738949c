"""What a token costs on its way from the engine to the user, with a device that takes no time.

    python benchmarks/frontend.py [--rows 512] [--tokens 128] [--step-ms 4.5] [--repeats 3]

`offline`: `LLM.generate`, all that is not `EngineLoop.step`, with and without text, and the longest time between two
steps, which must stay below a step of the device (`--step-ms`, slept through). `server`: the API process of a
streaming server from the engine's messages to the bytes given to the HTTP library, when it reads every message at once
and when `behind` of them wait (a server that is behind sends fewer, larger events).
Prints a table and one JSON line, in microseconds of CPU time of the one thread, so that a busy machine does not count.
The tokenizer is the packaged demo model's; its tokens are drawn as often as words of a text are (Zipf).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from time import sleep, thread_time_ns
from typing import Any

import numpy as np
from scheduler import InstantExecutor

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.client import EngineClient
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Abort, Deltas, Inbound, Outbound, Submit
from octavo.llm import LLM
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import Batch, KVGroup, StepResult
from octavo.sampling.params import SamplingParams
from octavo.server.app import create_app
from octavo.server.options import ServerOptions
from octavo.server.service import Service
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.locate import locate

BEHIND = (1, 4, 16)


class RandomExecutor(InstantExecutor):
    """Answers with random tokens, `delay` seconds after it is asked."""

    def __init__(self, groups: Sequence[KVGroup], vocab_size: int, delay: float) -> None:
        super().__init__(groups)
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._delay = delay

    def launch(self, batch: Batch) -> None:
        rows = batch.rows[batch.samples]
        tokens = ((1000 + self._rng.zipf(1.2, (len(rows), 1))) % self._vocab_size).astype(np.int32)
        counts = np.ones(len(rows), np.int32)
        self._results.append(StepResult(step=batch.step, rows=rows, tokens=tokens, counts=counts))

    def collect(self) -> StepResult:
        sleep(self._delay)
        return super().collect()


class TimedLoop(EngineLoop):
    """Knows how long its steps took, and the longest time between two of them."""

    nanoseconds = 0
    longest_gap = 0
    _ended = 0

    def step(self) -> dict[int, Deltas]:
        began = thread_time_ns()
        self.longest_gap = max(self.longest_gap, began - (self._ended or began))
        deltas = super().step()
        self._ended = thread_time_ns()
        self.nanoseconds += self._ended - began
        return deltas

    def restart(self) -> None:
        self.nanoseconds = self.longest_gap = self._ended = 0


def make_loop(rows: int, num_tokens: int, info: ModelInfo, delay: float = 0.0) -> TimedLoop:
    groups = [KVGroup(block_size=16, num_blocks=rows * (num_tokens // 16 + 5))]
    return TimedLoop(
        RandomExecutor(groups, info.vocab_size, delay),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=64 * rows),
        limits=ScheduleLimits(),
        max_model_len=info.max_model_len,
        run_ahead=1,
    )


def measure_offline(
    tokenizer: Tokenizer, info: ModelInfo, *, rows: int, num_tokens: int, delay: float, repeats: int, detokenize: bool
) -> tuple[float, float]:
    """Microseconds a token of `LLM.generate` outside of the engine's steps, and the most between two steps, less what
    requests of one token cost; answers end one after the other."""
    loop = make_loop(rows, num_tokens, info, delay)
    llm = LLM.from_engine(loop, info, tokenizer)
    prompts = np.random.default_rng(1).integers(10, 1000, (rows, 32)).tolist()
    lengths = [num_tokens // 2 + num_tokens * i // (2 * rows) for i in range(rows)]
    costs, gaps = [], []

    def spent(counts: Sequence[int]) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=detokenize) for n in counts]
        llm.reset_prefix_cache()
        loop.restart()
        began = thread_time_ns()
        llm.generate(prompts, params, use_tqdm=False)
        return thread_time_ns() - began - loop.nanoseconds

    for _ in range(repeats + 1):
        requests = spent([1] * rows)
        costs.append((spent(lengths) - requests) / 1000 / sum(lengths))
        gaps.append(loop.longest_gap / 1000)
    llm.close()
    return statistics.median(costs[1:]), statistics.median(gaps[1:])


class ReplayTransport:
    """An engine that answers all requests at once, `behind` of its steps waiting whenever the client reads."""

    client = 0

    def __init__(self, loop: TimedLoop, behind: int, expected: int) -> None:
        self._loop = loop
        self._behind = behind
        self._missing = expected
        self._begin = asyncio.Event()
        self.nanoseconds = 0

    def send(self, message: Inbound) -> None:
        began = thread_time_ns()
        self._loop.receive(message)
        self.nanoseconds += thread_time_ns() - began
        self._missing -= isinstance(message, Submit)
        assert not isinstance(message, Abort), "nothing is aborted here"
        if not self._missing:
            self._begin.set()

    async def receive(self) -> list[Outbound]:
        await self._begin.wait()
        messages: list[Outbound] = []
        began = thread_time_ns()
        while self._loop.has_work and len(messages) < self._behind:
            messages += self._loop.step().values()
        self.nanoseconds += thread_time_ns() - began
        if not messages:
            await asyncio.Event().wait()
        return messages

    async def close(self) -> None:
        self._loop.close()


async def measure_server(
    tokenizer: Tokenizer, info: ModelInfo, *, rows: int, num_tokens: int, behind: int, route: str
) -> tuple[float, float]:
    """(microseconds a token, tokens an event) from messages of the engine to bytes for the HTTP library."""
    loop = make_loop(rows, num_tokens, info)
    transport = ReplayTransport(loop, behind, rows)
    client = EngineClient(transport, tokenizer, info)
    app = create_app(Service(client, ServerOptions()))
    prompt = {"prompt": [5] * 32} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(prompt | {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}).encode()
    num_events = 0
    first_at = 0

    async def ask() -> None:
        messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal num_events, first_at
            first_at = first_at or thread_time_ns() - transport.nanoseconds
            num_events += message["type"] == "http.response.body"

        scope = {"type": "http", "method": "POST", "path": route, "raw_path": route.encode(), "headers": []}
        await app(scope | {"query_string": b"", "root_path": "", "http_version": "1.1"}, receive, send)

    gc.collect()
    gc.freeze()
    await asyncio.gather(*[ask() for _ in range(rows)])
    spent = (thread_time_ns() - transport.nanoseconds - first_at) / 1000
    gc.unfreeze()
    await client.shutdown()
    return spent / (rows * num_tokens), rows * num_tokens / num_events


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=4.5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    tokenizer = load_tokenizer(locate(""))
    info = ModelInfo(
        model="demo",
        served_names=("demo",),
        max_model_len=options.tokens + 256,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(0,),
        max_num_seqs=options.rows,
    )
    sizes: dict[str, Any] = {"rows": options.rows, "num_tokens": options.tokens}
    figures: dict[str, float] = {}

    def show(name: str, cost: float, note: str = "") -> None:
        figures[name] = round(cost, 2)
        print(f"{name:32} {cost:8.2f} us a token{note}", flush=True)

    for detokenize in (False, True):
        cost, gap = measure_offline(
            tokenizer, info, **sizes, delay=options.step_ms / 1000, repeats=options.repeats, detokenize=detokenize
        )
        show(f"offline, {'text' if detokenize else 'ids only'}", cost, f", {gap:.0f} us between two steps at most")
    for route in ("/v1/completions", "/v1/chat/completions"):
        for behind in BEHIND:
            cost, per_event = asyncio.run(measure_server(tokenizer, info, **sizes, behind=behind, route=route))
            show(f"{route}, {behind} behind", cost, f", {per_event:.1f} tokens an event")
    host = {
        "machine": platform.processor() or platform.machine(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
    }
    print(json.dumps({"benchmark": "frontend", "unit": "us a token", **host, **sizes, "results": figures}))


if __name__ == "__main__":
    main()
