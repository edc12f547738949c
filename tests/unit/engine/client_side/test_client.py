"""EngineClient over an engine on a thread: streams, aborts, failures, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.client import EngineClient, Mailbox
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.transport import ThreadTransport
from octavo.errors import EngineDeadError, EngineError, RequestError
from octavo.outputs import CompletionOutput, OutputMerger, RequestOutput
from octavo.plugin.data import ScheduleLimits
from octavo.sampling.params import SamplingParams
from octavo.testing.scripted import ScriptedExecutor
from octavo.tokenizer import Tokenizer

Scenario = Callable[[EngineClient], Coroutine[Any, Any, None]]
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


def make_loop(executor: ScriptedExecutor, *, run_ahead: int = 1, max_num_seqs: int = 8) -> EngineLoop:
    return EngineLoop(
        executor,
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        limits=ScheduleLimits(),
        max_model_len=64,
        run_ahead=run_ahead,
    )


@pytest.fixture
def play(tokenizer: Tokenizer, info: ModelInfo) -> Callable[..., EngineClient]:
    """play(scenario, executor) runs a coroutine function with a client, then shuts the client down."""

    def run(scenario: Scenario, executor: ScriptedExecutor, **settings: Any) -> EngineClient:
        clients = []

        async def main() -> None:
            client = EngineClient(ThreadTransport(make_loop(executor, **settings)), tokenizer, info)
            clients.append(client)
            try:
                await asyncio.wait_for(scenario(client), 20)
            finally:
                await client.shutdown()

        asyncio.run(main())
        return clients[0]

    return run


def scripted(script: Any = (40, 41, 42), **settings: Any) -> ScriptedExecutor:
    return ScriptedExecutor(script, **{"vocab_size": 384, "eos": 2, **settings})


async def collect(client: EngineClient, prompt: Any = (5, 6), params: Any = None, label: str = "r") -> RequestOutput:
    merger = OutputMerger()
    params = params or SamplingParams(max_tokens=10)
    async for delta in client.generate(prompt, params, request_id=label):
        merger.add(delta)
    result = merger.result()
    assert result is not None
    return result


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_stream_ends_with_exactly_one_finish(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        deltas = [d async for d in client.generate([5, 6], SamplingParams(max_tokens=9), request_id="a")]
        assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
        assert [o.finish_reason for d in deltas for o in d.outputs if o.finish_reason] == ["stop"]
        assert [t for d in deltas for o in d.outputs for t in o.token_ids] == [40, 41, 42, 2]

    play(scenario, scripted())


def test_text_prompts_and_stop_strings(play: Any, tokenizer: Tokenizer) -> None:
    async def scenario(client: EngineClient) -> None:
        result = await collect(client, "Once upon", SamplingParams(max_tokens=30, stop=("Paris",)))
        assert result.outputs[0].text == "The capital is "
        assert (result.outputs[0].stop_reason, result.prompt) == ("Paris", "Once upon")
        await until(lambda: client.stats().running == 0)

    play(scenario, scripted(tokenizer.encode("The capital is Paris, of course.")))


def test_long_prompts_are_tokenized_off_the_event_loop(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(RequestError, match="characters"):
            await collect(client, "x" * 5_000_000)
        with pytest.raises(RequestError, match="tokens"):
            await collect(client, [5] * 100_000)
        assert (await collect(client)).finished

    play(scenario, scripted())


def test_concurrent_streams_get_only_their_own_tokens(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        results = await asyncio.gather(*(collect(client, [100 + i], LONG, label=str(i)) for i in range(16)))
        for i, result in enumerate(results):
            assert result.request_id == str(i)
            assert result.outputs[0].token_ids == [100 + i] * 50

    play(scenario, scripted(lambda prompt: [prompt[-1]] * 60))


def test_several_answers_are_told_apart_by_index(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        result = await collect(client, [5], SamplingParams(n=3, max_tokens=4, logprobs=1))
        assert [o.index for o in result.outputs] == [0, 1, 2]
        assert all(o.token_ids == [40, 41, 42, 2] and len(o.logprobs or ()) == 4 for o in result.outputs)

    play(scenario, scripted())


def test_prompt_logprobs_come_with_the_first_delta(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=3, prompt_logprobs=1, n=2)
        deltas = [d async for d in client.generate(list(range(5, 45)), params, request_id="a")]
        first = deltas[0].prompt_logprobs
        assert first is not None
        assert first[0] is None
        assert [next(iter(entry or {})) for entry in first[1:]] == list(range(6, 45))
        assert all(d.prompt_logprobs is None for d in deltas[1:])

    play(scenario, scripted())


def test_closing_the_iterator_aborts_and_frees_the_blocks(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        async with aclosing(client.generate([5], LONG, request_id="a")) as stream:
            async for _ in stream:
                break
        assert client.num_live == 0
        await until(lambda: client.stats().aborts == 1 and client.stats().running == 0)
        assert client.stats().kv_usage == 0
        assert b'octavo:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in (
            client.metrics.render()
        )

    play(scenario, scripted(delay=0.005))


def test_cancelled_reader_aborts_its_request(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client, [5], LONG))
        await until(lambda: client.stats().running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: client.stats().aborts == 1)
        assert client.num_live == 0

    play(scenario, scripted(delay=0.005))


def test_abort_by_id_ends_the_stream_with_a_last_delta(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client, [5], LONG, label="x"))
        other = asyncio.create_task(collect(client, [5], SamplingParams(max_tokens=10), label="y"))
        await until(lambda: client.num_live == 2)
        await client.abort("x")
        await client.abort("unknown")
        assert (await task).outputs[0].finish_reason == "abort"
        assert (await other).outputs[0].finish_reason == "stop"

    play(scenario, scripted(delay=0.005))


def test_two_live_requests_may_share_an_id(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        results = await asyncio.gather(*(collect(client, [i], LONG, label="same") for i in (100, 101)))
        assert [r.outputs[0].token_ids[0] for r in results] == [100, 101]

    play(scenario, scripted(lambda prompt: [prompt[-1]] * 60))


def test_bad_request_leaves_the_engine_serving(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        for prompt, params in (([999], None), ([5], SamplingParams(max_tokens=100))):
            with pytest.raises(RequestError):
                await collect(client, prompt, params)
        assert client.num_live == 0
        assert (await collect(client)).finished

    play(scenario, scripted())


def test_a_row_that_fails_alone_is_an_engine_error_for_its_request_only(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(EngineError, match="scripted failure of row"):
            await collect(client)
        assert (await collect(client)).finished
        assert client.is_alive

    play(scenario, scripted(fail_rows={1: [0]}))


def test_a_dead_engine_fails_every_request_at_once(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        outcomes = await asyncio.gather(*(collect(client, [5], LONG) for _ in range(3)), return_exceptions=True)
        assert [type(o) for o in outcomes] == [EngineDeadError] * 3
        assert "scripted failure of step 4" in str(outcomes[0])
        assert not client.is_alive
        assert "scripted failure" in str(client.error)
        with pytest.raises(EngineDeadError):
            await collect(client)
        assert (client.stats().running, client.num_live) == (0, 0)

    play(scenario, scripted(fail_at_step=4))


def test_shutdown_with_drain_lets_live_requests_finish_and_refuses_new_ones(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        live = asyncio.create_task(collect(client, [5], LONG))
        await until(lambda: client.stats().running == 1)
        ending = asyncio.create_task(client.shutdown(drain=True))
        await asyncio.sleep(0)
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(client)
        await ending
        assert len((await live).outputs[0].token_ids) == 50

    play(scenario, scripted(delay=0.002))


def test_shutdown_aborts_what_does_not_finish_in_time(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        live = asyncio.create_task(collect(client, [5], LONG))
        await until(lambda: client.stats().running == 1)
        await client.shutdown(drain=True, timeout=0.05)
        assert (await live).outputs[0].finish_reason == "abort"

    play(scenario, scripted(delay=0.05))


def test_cached_tokens_are_reported_and_the_cache_can_be_reset(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        prompt = list(range(5, 45))
        assert (await collect(client, prompt)).num_cached_tokens == 0
        assert (await collect(client, prompt)).num_cached_tokens == 32
        await until(lambda: client.stats().kv_usage == 0)  # blocks in use are kept
        await client.reset_prefix_cache()
        assert (await collect(client, prompt)).num_cached_tokens == 0

    play(scenario, scripted())


def test_a_slow_reader_gets_everything_in_larger_deltas() -> None:
    async def scenario() -> None:
        mailbox = Mailbox()
        for token in (5, 6):
            mailbox.put(RequestOutput("r", None, [1], [CompletionOutput(0, "x", [token])]))
        mailbox.put(EngineError("broken"))
        delta = await mailbox.take()
        assert (delta.outputs[0].text, delta.outputs[0].token_ids) == ("xx", [5, 6])
        with pytest.raises(EngineError, match="broken"):
            await mailbox.take()

    asyncio.run(scenario())


def test_gauges_of_an_idle_engine_are_at_rest(play: Any) -> None:
    async def scenario(client: EngineClient) -> None:
        await asyncio.gather(*(collect(client, [i], LONG) for i in range(5, 17)))
        await until(lambda: client.stats().running == 0 and client.stats().waiting == 0)
        assert client.stats().kv_usage == 0
        assert client.stats().generation_tokens == 12 * 50

    play(scenario, scripted(), max_num_seqs=4)
