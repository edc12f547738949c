"""Requests that share an engine: its seeds, its memory and its prefix cache."""

from __future__ import annotations

import asyncio
import random

import pytest

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


def hashed(prompt: tuple[int, ...]) -> list[int]:
    """An answer in which every token depends on the whole prompt."""
    return random.Random(repr(prompt)).choices(range(40, 300), k=200)


async def test_case_F3_requests_without_a_seed_get_different_ones(serve):
    servers = [await serve([40] * 9) for _ in range(2)]
    for server in servers:
        for _ in range(2):
            await server.ask(PATH, {"prompt": [7], "max_tokens": 2, "temperature": 1})
    seeds = [admit.seed for server in servers for batch in server.executor.batches for admit in batch.admits]
    assert len(seeds) == len(set(seeds)) == 4


async def test_case_G4_with_too_little_memory_for_all_each_gets_its_own_answer(serve):
    server = await serve(hashed, num_blocks=20, max_num_seqs=8)
    prompts = [[50 + number] * 20 for number in range(8)]
    body = {"max_tokens": 100, "return_token_ids": True}
    answers = await asyncio.gather(*(server.ask(PATH, body | {"prompt": prompt}) for prompt in prompts))
    assert server.engine.stats.preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == hashed(tuple(prompt))[:100]
    message = await server.refused(PATH, {"prompt": [50] * 20, "max_tokens": 1000}, field="max_tokens")
    assert "1000" in message


@pytest.mark.parametrize(("salt", "hit"), [("", 48), ("mine", 0)])
async def test_case_G5_a_prefix_is_shared_only_under_the_same_salt(serve, salt, hit):
    server = await serve("yes")
    prompt = list(range(20, 70))
    await server.ask(PATH, {"prompt": prompt})
    body = {"prompt": prompt} | ({"cache_salt": salt} if salt else {})
    usage = (await server.ask(PATH, body))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == hit


async def test_case_X_abort_leaves_what_was_computed_to_the_next_request(serve):
    server = await serve([40] * 200, delay=0.002)
    prompt = list(range(20, 70))
    left = asyncio.create_task(server.ask(PATH, {"prompt": prompt, "max_tokens": 200}))
    while server.engine.stats.generation_tokens < 3:
        await asyncio.sleep(0.002)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await server.settled()
    assert server.engine.stats.generation_tokens < 200
    usage = (await server.ask(PATH, {"prompt": prompt, "max_tokens": 2}))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48
