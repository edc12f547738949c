"""What the log says of requests: a line when one has ended (--access-log), its prompts when it comes (--log-requests).

Only the second shows what users write, and only if the operator asks for it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.sampling.params import SamplingParams
from octavo.server.exchange import Exchange

access = logging.getLogger("octavo.access")
requests = logging.getLogger("octavo.requests")


def log_exchange(exchange: Exchange) -> None:
    """One line: what was asked of which route, how it ended, and how much it was. status 499: the client left."""
    first = exchange.first_token_at
    duration = time.monotonic() - exchange.started_at
    fields: dict[str, Any] = {
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status or 499,
        "duration_s": round(duration, 6),
        "key": None if exchange.key is None else exchange.key.name,
    }
    text = f"{exchange.method} {exchange.path} {fields['status']} in {duration:.3f} s"
    if exchange.num_sequences:
        fields |= {
            "model": exchange.model,
            "prompt_tokens": exchange.num_prompt_tokens,
            "cached_tokens": exchange.num_cached_tokens,
            "generated_tokens": exchange.num_generated_tokens,
            "ttft_s": None if first is None else round(first - exchange.started_at, 6),
            "finish_reasons": dict(Counter(exchange.finish_reasons)),
        }
        text += f", {exchange.num_prompt_tokens} prompt and {exchange.num_generated_tokens} generated tokens"
        text += "" if first is None else f", first after {fields['ttft_s']:.3f} s"
    text += f", key {fields['key']}" if exchange.key is not None else ""
    access.info(text, extra={"fields": fields})


def log_request(
    request_id: str, prompts: Sequence[str | list[int]], params: SamplingParams, *, limit: int | None
) -> None:
    """What a request asks for. limit: most characters or ids of each prompt."""
    shown = [prompt[:limit] for prompt in prompts]
    given = {name: value for name, value in msgspec.to_builtins(params).items() if value != getattr(PLAIN, name, None)}
    fields = {"prompts": shown, "prompt_lengths": [len(prompt) for prompt in prompts], "params": given}
    requests.info("request %s: prompts %r, %s", request_id, shown, given, extra={"fields": fields})


PLAIN = SamplingParams()
"""Parameters that say what this does need not be logged."""
