"""The engine in its own process: it starts, serves, dies and is noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig, ModelConfig
from octavo.engine import process
from octavo.engine.client import EngineClient
from octavo.engine.process import EngineHandle, start_engine
from octavo.engine.process_transport import ProcessTransport
from octavo.errors import CheckpointError, ConfigError, EngineDeadError, EngineError
from octavo.outputs import OutputMerger, RequestOutput
from octavo.sampling.params import SamplingParams

CONFIG = EngineConfig(model=ModelConfig(model="scripted", skip_tokenizer_init=True))
LONG = SamplingParams(max_tokens=50, detokenize=False, ignore_eos=True)

BUILDERS = """
import os, time
from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.process_transport import ProcessTransport
from octavo.errors import CheckpointError
from octavo.plugin.data import ScheduleLimits
from octavo.testing.scripted import ScriptedExecutor

INFO = ModelInfo(model="scripted", served_names=("scripted",), max_model_len=64, vocab_size=384, eos_token_ids=(2,))

def engine(**settings):
    executor = ScriptedExecutor(lambda prompt: [prompt[-1]] * 100, vocab_size=384, eos=2, **settings)
    loop = EngineLoop(executor, cache=CacheConfig(), scheduler=SchedulerConfig(), limits=ScheduleLimits(),
                      max_model_len=64, run_ahead=1)
    return loop, INFO

def good(config): return engine()
def slow(config): return engine(delay=0.02)
def failing(config): return engine(fail_at_step=4)
def corrupt(config): raise CheckpointError("cut short", path="model.safetensors")
def buggy(config): raise ZeroDivisionError("oops")
def dying(config): os._exit(7)
def sleepy(config): time.sleep(600)
"""


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of build functions that the spawned process can import too."""
    name = f"builders_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(BUILDERS)
    monkeypatch.syspath_prepend(tmp_path)
    return __import__(name)


def play(build: Any, scenario: Callable[[EngineClient, EngineHandle], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        handle = await start_engine(CONFIG, build=build)
        client = await EngineClient.connect(handle)
        try:
            await asyncio.wait_for(scenario(client, handle), 30)
        finally:
            await client.shutdown()
        assert handle.transport.pid is not None
        assert not running(handle.transport.pid)

    asyncio.run(main())


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def collect(client: EngineClient, prompt: list[int], params: SamplingParams = LONG) -> RequestOutput:
    merger = OutputMerger()
    async for delta in client.generate(prompt, params, request_id="r"):
        merger.add(delta)
    result = merger.result()
    assert result is not None
    return result


def test_requests_are_served_across_the_boundary(builders: Any) -> None:
    async def scenario(client: EngineClient, _: EngineHandle) -> None:
        assert client.info == builders.INFO
        results = await asyncio.gather(*(collect(client, [100 + i]) for i in range(20)))
        assert [r.outputs[0].token_ids for r in results] == [[100 + i] * 50 for i in range(20)]
        assert client.stats().generation_tokens == 1000

    play(builders.good, scenario)


def test_interrupts_do_not_reach_the_engine(builders: Any) -> None:
    async def scenario(client: EngineClient, handle: EngineHandle) -> None:
        task = asyncio.create_task(collect(client, [100]))
        await asyncio.sleep(0.1)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(handle.transport.pid or 0, number)
        assert len((await task).outputs[0].token_ids) == 50
        assert client.is_alive

    play(builders.slow, scenario)


def test_killed_engine_fails_its_requests_at_once(builders: Any) -> None:
    async def scenario(client: EngineClient, handle: EngineHandle) -> None:
        task = asyncio.create_task(collect(client, [100]))
        await asyncio.sleep(0.1)
        os.kill(handle.transport.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await asyncio.wait_for(task, 5)
        assert not client.is_alive
        with pytest.raises(EngineDeadError):
            await collect(client, [5])

    play(builders.slow, scenario)


def test_exception_in_a_step_reaches_the_client_with_its_reason(builders: Any, capfd: Any) -> None:
    async def scenario(client: EngineClient, _: EngineHandle) -> None:
        with pytest.raises(EngineDeadError, match="scripted failure of step 4"):
            await collect(client, [100])

    play(builders.failing, scenario)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        ("corrupt", CheckpointError, "model.safetensors: cut short"),
        ("buggy", EngineError, "ZeroDivisionError: oops"),
        ("dying", EngineDeadError, "exit code 7"),
    ],
)
def test_failed_start_raises_what_the_engine_raised(
    builders: Any, build: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        asyncio.run(asyncio.wait_for(start_engine(CONFIG, build=getattr(builders, build)), 30))
    assert type(caught.value) is kind


def test_cancelled_start_ends_the_process_without_waiting_for_it(
    builders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ProcessTransport] = []
    real = process.spawn

    def spawn(*args: Any, **how: Any) -> ProcessTransport:
        started.append(real(*args, **how))
        return started[0]

    monkeypatch.setattr(process, "spawn", spawn)

    async def main() -> None:
        task = asyncio.create_task(start_engine(CONFIG, build=builders.sleepy))
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 9))
    assert not running(started[0].pid or 0)


def test_too_long_temporary_folder_is_named(builders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        asyncio.run(start_engine(CONFIG, build=builders.good))
    assert list(deep.iterdir()) == []


def test_engine_ends_when_its_parent_is_killed(builders: Any, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import {builders.__name__} as builders
        from octavo.config import EngineConfig, ModelConfig
        from octavo.engine.process import start_engine

        async def main():
            config = EngineConfig(model=ModelConfig(skip_tokenizer_init=True))
            handle = await start_engine(config, build=builders.good)
            print(handle.transport.pid, flush=True)
            await asyncio.sleep(600)

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        assert running(engine)
        parent.kill()
    deadline = time.monotonic() + 10
    while running(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(engine)
