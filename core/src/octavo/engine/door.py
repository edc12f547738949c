"""Checks at the door: what may enter the engine, and in which form. Pure: no state of requests, safe on any thread.

prompt text ──tokenize──┐
prompt ids ───check─────┴─> length against the context, room for the answer ─> Prepared
SamplingParams ──> ids in the vocabulary, bad words as ids, the tokens that end the answer
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.engine.info import ModelInfo
from octavo.errors import RequestError, RequestTooLargeError
from octavo.sampling.params import SamplingParams, integer
from octavo.structured.compile import check

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

THINKING = "thinking_token_budget"
ALL = slice(None)
THINKING_MARKS = ("<think>", "</think>")
"""Around reasoning, where a request does not say which tokens end it (`structured_after`)."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prompt and its parameters, checked.

    text: the prompt as given, None if it came as ids. params: as given. engine_params: what the engine needs of
    them. eos: ids that end the answer. max_tokens: resolved, fits the context. salt: of the prefix cache.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    engine_params: SamplingParams
    eos: tuple[int, ...]
    max_tokens: int
    priority: int
    salt: bytes


class Door:
    """Checks prompts and parameters against one model. tokenizer None: token ids only."""

    def __init__(self, tokenizer: Tokenizer | None, info: ModelInfo) -> None:
        self.tokenizer = tokenizer
        self.info = info
        # The parameters resolved last: a batch of prompts usually shares one object.
        self._resolved: tuple[SamplingParams, SamplingParams, tuple[int, ...]] | None = None

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        default_max_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        text: str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Prepared:
        """Check and tokenize. `text` is shown as the prompt when it came as ids.

        Raises RequestError naming the field (an argument's name or a sampling field), RequestTooLargeError when the
        prompt alone or with max_tokens exceeds the context.
        """
        integer(priority, "priority", low=-(2**31), high=2**31 - 1)
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, not {cache_salt!r}", field="cache_salt")
        engine_params, eos = self._resolve(params)
        kept = self._kept(params)
        if isinstance(prompt, str):
            text = prompt
            token_ids = self._encode(prompt, add_special_tokens, whole=kept == ALL)
        else:
            token_ids = self._check_ids(prompt, kept)
        if not token_ids and self.tokenizer is not None and not isinstance(prompt, str):
            token_ids = self.tokenizer.encode("", add_special_tokens=add_special_tokens)
        token_ids = token_ids[kept]
        if kept != ALL:
            text = None  # as it was sent it may say more than the prompt
        if not token_ids:
            raise RequestError(
                "the prompt is empty, and the tokenizer puts no start token before it; send at least one token",
                field="prompt",
            )
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            raise RequestTooLargeError(
                f"the prompt has {len(token_ids)} tokens; this server takes prompts of at most {max_prompt_tokens}",
                field="prompt",
            )
        return Prepared(
            text=text,
            token_ids=token_ids,
            params=params,
            engine_params=engine_params,
            eos=eos,
            max_tokens=self._room(len(token_ids), params.max_tokens, default_max_tokens),
            priority=priority,
            salt=cache_salt.encode("utf-8", "surrogatepass"),
        )

    def _encode(self, text: str, add_special_tokens: bool, *, whole: bool) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("no tokenizer is loaded: send the prompt as token ids", field="prompt")
        limit = self.info.max_model_len
        if whole and len(text) > limit and len(text) > limit * self._longest_token:
            # Hopeless whatever the tokens are, and tokenizing megabytes takes seconds.
            raise RequestTooLargeError(
                f"the prompt has {len(text)} characters; the model's context of {limit} tokens holds at most "
                f"{limit * self._longest_token}. Shorten the prompt",
                field="prompt",
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the vocabulary's longest token: no token stands for more characters than that."""
        assert self.tokenizer is not None
        return max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.vocab_size))

    def _check_ids(self, prompt: Sequence[int], kept: slice) -> list[int]:
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence):
            raise RequestError(f"the prompt must be text or token ids, not {type(prompt).__name__}", field="prompt")
        token_ids = list(prompt[kept])
        if len(token_ids) > self.info.max_model_len:
            self._room(len(token_ids), None, None)  # raises: too long, before a look at millions of ids
        for token in token_ids:
            if type(token) is not int:
                raise RequestError(f"the prompt holds {token!r}, which is not a token id (an integer)", field="prompt")
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    f"the prompt holds token id {token}; the vocabulary has ids 0 to {self.info.vocab_size - 1}",
                    field="prompt",
                )
        return token_ids

    def _kept(self, params: SamplingParams) -> slice:
        """Which tokens of a long prompt stay (`truncate_prompt_tokens`). -1 leaves room for max_tokens, or one."""
        most = params.truncate_prompt_tokens
        if most is None:
            return ALL
        if most == -1:
            most = max(self.info.max_model_len - (1 if params.max_tokens is None else params.max_tokens), 1)
        return slice(most) if params.truncation_side == "right" else slice(-most, None)

    def _room(self, num_prompt_tokens: int, asked: int | None, default: int | None) -> int:
        """max_tokens resolved. None is the default, or all the room left; more than the room is an error.

        A prompt that fills the context can only be scored (max_tokens 0).
        """
        limit = self.info.max_model_len
        room = limit - num_prompt_tokens
        if room < 0 or (room == 0 and asked != 0):
            raise RequestTooLargeError(
                f"the prompt has {num_prompt_tokens} tokens; the model's context is {limit} tokens, prompt and answer "
                f"together{'' if asked is None else f', and {asked} were asked for'}. Shorten the prompt",
                field="prompt",
            )
        if asked is None:
            return room if default is None else min(default, room)
        if asked > room:
            raise RequestTooLargeError(
                f"max_tokens is {asked} and the prompt has {num_prompt_tokens} tokens, together "
                f"{asked + num_prompt_tokens}; the model's context is {limit} tokens. "
                f"Ask for at most {room}, or shorten the prompt",
                field="max_tokens",
            )
        return asked

    def _resolve(self, params: SamplingParams) -> tuple[SamplingParams, tuple[int, ...]]:
        """The parameters as the engine takes them, and the ids that end an answer."""
        last = self._resolved  # read once: another thread may replace it
        if last is not None and last[0] is params:
            return last[1:]
        info = self.info
        params.check_vocab(info.vocab_size)
        if params.structured_outputs is not None:
            if self.tokenizer is None:
                raise RequestError(
                    "structured_outputs need a tokenizer, and none is loaded", field="structured_outputs"
                )
            check(params.structured_outputs)
        if params.min_tokens > info.max_model_len:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; the model's context is {info.max_model_len} tokens",
                field="min_tokens",
            )
        if self.tokenizer is None and params.stop:
            raise RequestError("stop strings need a tokenizer, and none is loaded", field="stop")
        if params.use_beam_search:
            raise RequestError("beam search is not sampling: use LLM.beam_search", field="use_beam_search")
        eos = dict.fromkeys(params.stop_token_ids if params.ignore_eos else info.eos_token_ids + params.stop_token_ids)
        bad_words_ids = params.bad_words_ids + self._bad_words_ids(params.bad_words)
        check_choice_left(params, bad_words_ids, eos)
        engine_params = msgspec.structs.replace(
            params,
            n=1,
            best_of=None,
            seed=None,
            stop=(),
            bad_words=(),
            bad_words_ids=bad_words_ids,
            logprobs_mode=params.logprobs_mode or info.logprobs_mode,
            thinking_token_budget=None,
            extra_args=self._extra_args(params),
            truncate_prompt_tokens=None,
            truncation_side=None,
            # More than the vocabulary is "off"; a number this large may not even fit a message.
            top_k=params.top_k if params.top_k < info.vocab_size else 0,
        )
        self._resolved = (params, engine_params, tuple(eos))
        return engine_params, tuple(eos)

    def _bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the start of a text and after a space."""
        if words and self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and none is loaded", field="bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            assert self.tokenizer is not None
            variants = (tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in (word, f" {word}"))
            kept = [ids for ids in variants if ids]
            if not kept:
                raise RequestError(f"bad_words: {word!r} has no tokens in this vocabulary", field="bad_words")
            found.update(dict.fromkeys(kept))
        return tuple(found)

    def _extra_args(self, params: SamplingParams) -> dict[str, Any] | None:
        """Arguments of logits processors by name, that of `thinking_token_budget` among them."""
        for name in params.extra_args or ():
            if name not in self.info.logits_processors:
                known = ", ".join(self.info.logits_processors) or "none is installed"
                raise RequestError(
                    f"extra_args: no logits processor has the name {name!r}; known: {known}", field="extra_args"
                )
        budget = params.thinking_token_budget
        if budget is None:
            return params.extra_args
        if THINKING not in self.info.logits_processors:
            raise RequestError("thinking_token_budget: this engine cannot limit reasoning", field=THINKING)
        if self.tokenizer is None:
            raise RequestError("thinking_token_budget needs a tokenizer, and none is loaded", field=THINKING)
        start, end = (self.tokenizer.encode(mark, add_special_tokens=False) for mark in THINKING_MARKS)
        end = list(params.structured_after) or end
        return {**(params.extra_args or {}), THINKING: {"budget": budget, "start": start, "end": end}}


def check_choice_left(params: SamplingParams, bad_words_ids: Sequence[Sequence[int]], eos: Collection[int]) -> None:
    """Raise RequestError if allowed_token_ids, less what else is forbidden, leave no token to choose."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {word[0] for word in bad_words_ids if len(word) == 1}
    if not left:
        raise RequestError("allowed_token_ids: bad_words forbid all of them", field="allowed_token_ids")
    if params.min_tokens and not left - set(eos):
        raise RequestError(
            "allowed_token_ids: only tokens that end the answer are left, and min_tokens forbids them",
            field="allowed_token_ids",
        )
