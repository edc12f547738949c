"""Engines with two ranks, as real processes: they say what one rank says, and end clearly when a rank does not."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from octavo import LLM, SamplingParams
from octavo.config import make_config
from octavo.engine.client import EngineClient
from octavo.engine.process import start_engine
from octavo.errors import ConfigError, EngineDeadError, EngineError, ModelNotFoundError
from octavo.testing.tiny import make_model

SETTINGS: dict[str, Any] = {
    "platform": "cpu",
    "dtype": "float32",
    "num_kv_blocks": 64,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "skip_tokenizer_init": True,
}
COMMON: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "detokenize": False}
WORK = [
    ([5, 6, 7], SamplingParams(temperature=0, **COMMON)),
    ([9, 8] * 25, SamplingParams(temperature=0, **COMMON)),
    ([11], SamplingParams(temperature=1.2, seed=3, top_p=0.9, **COMMON)),
    ([30] * 9, SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2, **COMMON)),
    (list(range(40, 80)), SamplingParams(temperature=0.9, seed=4, n=2, logit_bias={7: 2.0}, **COMMON)),
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def answers(llm: LLM) -> list[list[list[int]]]:
    results = llm.generate([prompt for prompt, _ in WORK], [params for _, params in WORK], use_tqdm=False)
    return [[output.token_ids for output in result.outputs] for result in results]


def rank_processes() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("octavo-rank")]


@pytest.mark.parametrize(
    ("model_type", "platform", "run_ahead"),
    # refdev replays recorded steps, collectives among them.
    [("llama", "cpu", 0), ("qwen3", "refdev", 1), ("gemma3_text", "cpu", 1)],
)
def test_two_ranks_give_the_tokens_of_one(
    model_type: str, platform: str, run_ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
    monkeypatch.setenv("REFDEV_VISIBLE", "")  # which rank 0 sets
    settings = SETTINGS | {"platform": platform, "run_ahead": run_ahead}
    folder = str(make_model(tmp_path / "model", model_type, tokenizer=False, vocab_size=383))
    with LLM(folder, **settings) as llm:
        want = answers(llm)
    with LLM(folder, tensor_parallel_size=2, **settings) as llm:
        assert len(rank_processes()) == 1
        assert answers(llm) == want
        # Rows and blocks of the first call are used again.
        assert answers(llm) == want
    assert rank_processes() == []
    assert not dist.is_initialized()


def test_a_rank_killed_while_serving_ends_the_request_and_the_engine(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model", "llama", tokenizer=False))
    with LLM(folder, tensor_parallel_size=2, **SETTINGS) as llm:
        stream = llm.stream([5, 6], SamplingParams(temperature=0, **COMMON | {"max_tokens": 100}))
        next(stream)
        (process,) = rank_processes()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"the process of rank 1 has ended \(killed by signal 9\)"):
            list(stream)
        with pytest.raises(EngineError, match="rank 1 has ended"):
            llm.generate([[5]], SamplingParams(**COMMON))
    assert rank_processes() == []
    assert not dist.is_initialized()


def test_an_idle_server_whose_rank_is_killed_says_so_and_ends(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model", "llama", tokenizer=False))
    config = make_config(model=folder, tensor_parallel_size=2, run_ahead=1, **SETTINGS)
    params = SamplingParams(temperature=0, **COMMON)

    async def scenario() -> None:
        handle = await start_engine(config)
        client = await EngineClient.connect(handle)
        engine = handle.transport.pid
        assert engine is not None
        try:
            async for _ in client.generate([5, 6], params, request_id="r"):
                pass
            ranks = children_of(engine)
            assert len(ranks) == 1
            os.kill(ranks[0], signal.SIGKILL)
            while client.is_alive:
                await asyncio.sleep(0.1)
            with pytest.raises(EngineDeadError, match="rank 1 has ended"):
                async for _ in client.generate([5, 6], params, request_id="r"):
                    pass
        finally:
            await client.shutdown()
        assert not Path(f"/proc/{engine}").exists()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def children_of(pid: int) -> list[int]:
    """Python children (multiprocessing's resource tracker aside)."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(int(child))
    return found


def test_what_every_rank_refuses_is_one_error(tmp_path: Path) -> None:
    odd = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    folder = str(make_model(tmp_path / "model", "llama", tokenizer=False, **odd))
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size 2 does not divide num_attention_heads \(3\)"):
        LLM(folder, tensor_parallel_size=2, **SETTINGS)
    assert rank_processes() == []
    assert not dist.is_initialized()


def test_an_absent_model_is_one_error() -> None:
    with pytest.raises(ModelNotFoundError, match=r"^no file or folder .*no-such-folder"):
        LLM("./no-such-folder", tensor_parallel_size=2, **SETTINGS)
    assert rank_processes() == []


PLATFORM = """
import octavo_cpu
from octavo.plugin import PlatformInfo, WorkerLaunch, hookimpl

platform_probe, platform_caps = octavo_cpu.platform_probe, octavo_cpu.platform_caps

@hookimpl
def platform_info():
    return PlatformInfo(name="lame", api="1.0", version="1", device_type="cpu")

@hookimpl
def make_device(local_rank, config, caps):
    if local_rank == 1:
        raise RuntimeError("card 1 fell off the bus")
    return octavo_cpu.make_device(local_rank, config, caps)
"""


def test_a_rank_that_fails_alone_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lame_platform.py").write_text(PLATFORM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "lame=lame_platform")
    folder = str(make_model(tmp_path / "model", "llama", tokenizer=False))
    with pytest.raises(Exception, match=r"^rank 1: .*make_device raised RuntimeError: card 1 fell off the bus"):
        LLM(folder, tensor_parallel_size=2, **SETTINGS | {"platform": "lame"})
    assert rank_processes() == []


def test_a_second_engine_with_ranks_in_one_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(make_model(tmp_path / "model", "llama", tokenizer=False))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"torch\.distributed is in use in this process"):
        LLM(folder, tensor_parallel_size=2, **SETTINGS)
