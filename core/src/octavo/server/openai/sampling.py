"""From a body's fields to `SamplingParams`; and the fields that are known but not supported yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams, integer
from octavo.server.errors import unsupported
from octavo.server.openai.protocol import SamplingFields, StreamOptions
from octavo.server.openai.response_format import read_structured_outputs

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config decides where the request does not."""

PLAIN = (
    *MODEL_DEFAULTS,
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logprob_token_ids",
    "repetition_detection",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "best_of",
    "length_penalty",
    "early_stopping",
)
"""Fields that mean the same in a body and in SamplingParams."""

REFUSED = (
    "kv_transfer_params",
    "ec_transfer_params",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "suffix",
    "prompt_embeds",
    "functions",
    "function_call",
    "audio",
    "web_search_options",
    "return_prompt_text",
)
"""Fields that change the answer in a way not supported yet: ignoring them would answer another question."""


def to_params(
    body: SamplingFields,
    *,
    defaults: Mapping[str, float | int],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    detokenize: bool,
) -> SamplingParams:
    """Sampling parameters of a request. defaults: the model's. Raises RequestError naming the field."""
    given: dict[str, Any] = {name: defaults[name] for name in MODEL_DEFAULTS if name in defaults}
    given |= {name: value for name in PLAIN if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = body.stop
    if body.vllm_xargs:
        given["extra_args"] = body.vllm_xargs
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=read_logit_bias(body.logit_bias),
        structured_outputs=read_structured_outputs(body),
        detokenize=detokenize,
    )


def refuse_unsupported(body: object) -> None:
    """Raise RequestError for the first field that asks for a feature of a later version."""
    for name in REFUSED:
        if getattr(body, name, None) not in (None, False, [], {}, ""):
            raise unsupported(name)
    if any(modality != "text" for modality in getattr(body, "modalities", None) or ()):
        raise unsupported("modalities", "only text")
    best_of = getattr(body, "best_of", None)
    if best_of not in (None, getattr(body, "n", None) or 1) and not getattr(body, "use_beam_search", None):
        raise unsupported("best_of", "only the same as n, or with use_beam_search")


def check_request_fields(body: SamplingFields) -> None:
    """Raise RequestError for what is no sampling but still goes to the engine or into headers and ids."""
    if body.priority is not None:
        integer(body.priority, "priority", low=-(2**31), high=2**31 - 1)
    if body.request_id is not None and not 0 < len(body.request_id) <= 256:
        raise RequestError("request_id must have 1 to 256 characters", field="request_id")
    if body.cache_salt == "":
        raise RequestError("cache_salt must not be empty", field="cache_salt")
    if body.stream_interval is not None:
        integer(body.stream_interval, "stream_interval", low=1)


def check_max_logprobs(value: int | None, *, limit: int, field: str) -> None:
    """Raise RequestError if a request asks for more logprobs a token than the operator allows (-1: any number)."""
    if value is not None and limit != -1 and (value > limit or value == -1):
        asked = "the whole vocabulary" if value == -1 else value
        raise RequestError(f"{field} may be at most {limit} (--max-logprobs), not {asked}", field=field)


def stream_options(body: SamplingFields) -> StreamOptions:
    """The stream options. Raises RequestError if they are given without a stream."""
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise RequestError("stream_options needs stream=true", field="stream_options")
    return body.stream_options


def read_logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Biases by token id. Raises RequestError for a key that is none."""
    if not bias:
        return None
    out = {}
    for key, value in bias.items():
        # Exactly a decimal number: int() would also take "1_0", " 7" and digits of other scripts.
        if not (key.isascii() and key.removeprefix("-").isdigit()):
            raise RequestError(f"logit_bias has the key {key!r}, which is no token id", field="logit_bias")
        out[int(key)] = value
    return out
