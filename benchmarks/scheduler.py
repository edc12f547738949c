"""How long the engine's own Python takes per step: schedule, update and messages, with a device that takes no time.

    python benchmarks/scheduler.py [--rows 256 1024] [--steps 2000]

Steady decode: all rows run, one token each, a new block every 16 steps, rows spread evenly over the block. Prints a
table of percentiles and one JSON line, in microseconds of CPU time of the one thread, so that a busy machine does not
count. `window`: a second, sliding KV group.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections import deque
from collections.abc import Sequence
from time import thread_time_ns

import numpy as np

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Submit
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import Batch, KVGroup, StepResult
from octavo.sampling.params import SamplingParams

PERCENTILES = (10, 50, 90, 99)


class InstantExecutor:
    """Answers with token 7 for ever. Its own time is measured and taken off."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.kv_groups = groups
        self.nanoseconds = 0
        self._results: deque[StepResult] = deque()

    def launch(self, batch: Batch) -> None:
        began = thread_time_ns()
        rows = batch.rows[batch.samples]
        tokens, counts = np.full((len(rows), 1), 7, np.int32), np.ones(len(rows), np.int32)
        self._results.append(StepResult(step=batch.step, rows=rows, tokens=tokens, counts=counts))
        self.nanoseconds += thread_time_ns() - began

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


def measure(*, rows: int, steps: int, run_ahead: int, window: int | None) -> dict[str, float]:
    """Microseconds of one `EngineLoop.step` in steady decode, by percentile."""
    length = 64 + steps + 200
    blocks = rows * (length // 16 + 5)
    groups = [KVGroup(block_size=16, num_blocks=blocks)]
    if window:
        groups.append(KVGroup(block_size=16, num_blocks=blocks, window=window))
    executor = InstantExecutor(groups)
    loop = EngineLoop(
        executor,
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(2048, rows)),
        limits=ScheduleLimits(),
        max_model_len=length + 64,
        run_ahead=run_ahead,
    )
    rng = np.random.default_rng(0)
    for handle in range(rows):
        prompt = rng.integers(10, 1000, 32 + handle % 16, dtype=np.int32)
        request = Submit(
            handle=handle,
            client=0,
            tokens=prompt.tobytes(),
            params=SamplingParams(),
            max_tokens=length,
            seed=0,
            eos=(2,),
        )
        loop.receive(request)
    while loop.stats.waiting or loop.stats.generation_tokens < 4 * rows:
        loop.step()
    assert loop.stats.running == rows
    times = np.empty(steps)
    gc.collect()
    gc.freeze()
    for step in range(steps):
        device = executor.nanoseconds
        began = thread_time_ns()
        loop.step()
        times[step] = (thread_time_ns() - began - (executor.nanoseconds - device)) / 1000
    gc.unfreeze()
    assert loop.stats.running == rows
    return {f"p{p}": round(float(np.percentile(times, p)), 1) for p in PERCENTILES}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args(argv)
    figures = []
    print("rows  run_ahead  window " + "".join(f"{f'p{p}':>9}" for p in PERCENTILES) + "   us a step")
    for rows in options.rows:
        for run_ahead, window in ((0, None), (1, None), (1, 512)):
            figure = measure(rows=rows, steps=options.steps, run_ahead=run_ahead, window=window)
            figures.append({"rows": rows, "run_ahead": run_ahead, "window": window, **figure})
            cells = "".join(f"{figure[f'p{p}']:9.1f}" for p in PERCENTILES)
            print(f"{rows:4d}  {run_ahead:9d}  {window or '-':>6} {cells}")
    host = {
        "machine": platform.processor() or platform.machine(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
    }
    print(json.dumps({"benchmark": "scheduler", "unit": "us", **host, "results": figures}))


if __name__ == "__main__":
    main()
