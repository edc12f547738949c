"""What bodies of completions, chats and responses have in common. Optional fields take null as "not given".

Sampling fields are checked by `SamplingParams`; here only their types are.
"""

from __future__ import annotations

from typing import Any

import msgspec


class SharedFields(msgspec.Struct, kw_only=True):
    """Who is asked, how it samples, and what has no effect on the answer."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    structured_outputs: Any = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Without effect on the answer:
    user: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
