"""Fewer, larger deltas for a client that asks for them (`stream_interval`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.outputs import OutputMerger, RequestOutput


async def spaced(stream: AsyncGenerator[RequestOutput, None], num_tokens: int) -> AsyncGenerator[RequestOutput, None]:
    """The same stream, its deltas joined until some answer has `num_tokens` new tokens.

    An answer's first tokens go on at once, and so does its end.
    """
    merger = OutputMerger()
    waiting: Counter[int] = Counter()
    begun: set[int] = set()
    async with aclosing(stream):
        async for delta in stream:
            merger.add(delta)
            due = delta.finished
            for new in delta.outputs:
                waiting[new.index] += len(new.token_ids)
                due |= new.index not in begun or new.finish_reason is not None or waiting[new.index] >= num_tokens
            if due and (joined := merger.result()) is not None:
                begun.update(waiting)
                waiting.clear()
                merger = OutputMerger()
                yield joined
