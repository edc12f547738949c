"""Beam search for a request to the server (`use_beam_search`). The search itself is `octavo.beam_search`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from octavo.beam_search import BeamSearch, checked_as_sampled
from octavo.errors import RequestError
from octavo.outputs import OutputMerger, RequestOutput
from octavo.sampling.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.client import EngineClient


MAX_CANDIDATES = 2**19
"""Of a step of all prompts of a request: 512 beams of one prompt. They grow with the square of the beams, and all are
in memory at once."""


def check_beams(num_prompts: int, params: SamplingParams) -> None:
    """Raise RequestError for more beams than a server can hold."""
    width = params.best_of or params.n
    if 2 * num_prompts * width**2 > MAX_CANDIDATES:
        raise RequestError(
            f"beam search with {width} beams for {num_prompts} prompts is too much for one request: a step of it has "
            f"{2 * num_prompts * width**2} candidates, and at most {MAX_CANDIDATES} are allowed",
            field="n",
        )


async def search_beams(
    client: EngineClient,
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int = 0,
    cache_salt: str = "",
    **how: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """As `EngineClient.generate` with the same arguments, but all answers come at the end, in one delta, best first.

    Raises the same, before anything is computed if the request is wrong. Leaving it early aborts its beams.
    """
    prepared = await client.prepare(prompt, checked_as_sampled(params), priority=priority, cache_salt=cache_salt, **how)
    shown = None if params.logprobs == -1 else params.logprobs or 0
    search = BeamSearch(params, prepared, client.door, num_logprobs=shown)

    async def extend(index: int, token_ids: list[int], step: SamplingParams) -> RequestOutput:
        merger = OutputMerger()
        stream = client.generate(
            token_ids, step, request_id=f"{request_id}-beam{index}", priority=priority, cache_salt=cache_salt
        )
        async with aclosing(stream):
            async for delta in stream:
                merger.add(delta)
        whole = merger.result()
        assert whole is not None, "a stream that ends has brought a delta"
        return whole

    while not search.done:
        beams = [asyncio.create_task(extend(i, *request)) for i, request in enumerate(search.requests())]
        try:
            search.advance(await asyncio.gather(*beams))
        finally:
            for beam in beams:
                beam.cancel()
            await asyncio.gather(*beams, return_exceptions=True)
    yield search.result(request_id)
