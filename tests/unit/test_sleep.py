"""A sleeping engine keeps nothing of its executor, and a woken one says what it said before. Real model, CPU."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from octavo.config import make_config
from octavo.engine.messages import Control, Submit, int32
from octavo.launch import build_engine
from octavo.sampling.params import SamplingParams
from octavo.testing.tiny import make_model


def run(loop) -> list[int]:
    """Tokens until the engine is idle."""
    tokens: list[int] = []
    while loop.has_work:
        for deltas in loop.step().values():
            tokens += int32(deltas.tokens).tolist()
    return tokens


def answer(loop, handle: int) -> list[int]:
    prompt = np.arange(5, 25, dtype=np.int32).tobytes()
    params = SamplingParams(temperature=0)
    loop.receive(Submit(handle=handle, client=0, tokens=prompt, params=params, max_tokens=6, seed=1))
    return run(loop)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_kv_memory_of_a_sleeping_engine_are_gone(tmp_path, level):
    model = make_model(tmp_path / "tiny", "llama")
    config = make_config(model=str(model), platform="cpu", dtype="float32", num_kv_blocks=64, max_num_seqs=4, threads=1)
    loop, _ = build_engine(config)
    before = answer(loop, 1)
    executor = loop._executor
    remains = [
        weakref.ref(thing)
        for thing in (executor, executor.model, executor.kv[0].k, executor.table.tokens, executor.sampler)
    ]
    del executor
    loop.receive(Control(client=0, ticket=1, action="sleep", level=level))
    run(loop)
    gc.collect()
    assert [ref() for ref in remains] == [None] * len(remains)
    loop.receive(Control(client=0, ticket=2, action="wake_up"))
    run(loop)
    assert [done.error for _, done in loop.take_done()] == ["", ""]
    assert answer(loop, 2) == before
    loop.close()


SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
TOLD = """
from dataclasses import replace
from octavo.plugin import hookimpl
from octavo.testing import refdev
from octavo.testing.refdev import make_device, platform_caps, platform_launch, platform_probe, register_kernels

events = []


@hookimpl
def platform_info():
    return replace(refdev.platform_info(), name="told")


@hookimpl
def worker_event(event, worker):
    events.append((event, worker.rank, worker.device.type))
"""


def test_a_platform_hears_of_its_workers_when_they_serve_and_before_they_go(tmp_path, monkeypatch):
    (tmp_path / "told_platform.py").write_text(TOLD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "told=told_platform")
    model = make_model(tmp_path / "tiny", "llama", tokenizer=False)
    config = make_config(
        model=str(model), platform="told", dtype="float32", num_kv_blocks=64, skip_tokenizer_init=True, **SMALL
    )
    loop, _ = build_engine(config)
    from told_platform import events

    ready, gone = ("ready", 0, "refdev"), ("shutdown", 0, "refdev")
    assert events == [ready]
    loop.receive(Control(client=0, ticket=1, action="sleep", level=1))
    run(loop)
    assert events == [ready, gone]
    loop.receive(Control(client=0, ticket=2, action="wake_up"))
    run(loop)
    assert events == [ready, gone, ready]
    loop.close()
    assert events == [ready, gone, ready, gone]
