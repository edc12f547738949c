"""How to sample: names and defaults as in vLLM, checked when made. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from octavo.errors import RequestError
from octavo.sampling.repetition import RepetitionDetectionParams
from octavo.structured.spec import StructuredOutputs

SEED_LIMIT = 2**63
MAX_BAD_WORDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
"""What `logprobs` are: of the model as it is (raw) or of what is sampled from; log-softmax or the logits themselves."""


class Range(NamedTuple):
    """Numbers that a parameter may have: [low, high], or (low, high] when `above`; no high is no limit."""

    kind: type[int] | type[float]
    low: float
    high: float | None = None
    above: bool = False
    optional: bool = False


RANGES: Mapping[str, Range] = {
    "n": Range(int, 1, 16384),
    "presence_penalty": Range(float, -2.0, 2.0),
    "frequency_penalty": Range(float, -2.0, 2.0),
    "repetition_penalty": Range(float, 1e-6, 1e6),  # beyond, logits of float32 overflow
    "temperature": Range(float, 0.0),
    "top_p": Range(float, 0.0, 1.0, above=True),
    "top_k": Range(int, -1),
    "min_p": Range(float, 0.0, 1.0),
    "seed": Range(int, -SEED_LIMIT, SEED_LIMIT - 1, optional=True),
    "min_tokens": Range(int, 0),
    "max_tokens": Range(int, 0, optional=True),
    "logprobs": Range(int, -1, optional=True),
    "prompt_logprobs": Range(int, -1, optional=True),
    "thinking_token_budget": Range(int, -1, optional=True),
    "truncate_prompt_tokens": Range(int, -1, optional=True),
    "best_of": Range(int, 1, 16384, optional=True),
    "length_penalty": Range(float, -100.0, 100.0),
}
"""What a parameter may be by itself, whatever the others are. The server's API description says the same."""

CHOICES: Mapping[str, Sequence[Any]] = {
    "logprobs_mode": (None, *LOGPROBS_MODES),
    "truncation_side": (None, "left", "right"),
    "early_stopping": (False, True, "never"),
}
"""The same, of what is no number."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request. Raises RequestError naming the field when a value is out of range.

    n: answers to the prompt, which is computed once for all of them. Greedy answers are equal.
    presence_penalty: taken from the logits of tokens that the answer holds.
    frequency_penalty: the same, as often as it holds them.
    repetition_penalty: divides (negative: multiplies) the logits of tokens that prompt or answer hold.
    temperature: 0 (or below 1e-5) takes the likeliest token.
    top_p: the likeliest tokens that together have this probability.
    top_k: that many of the likeliest tokens; 0 or -1 is off.
    min_p: tokens at least this share as likely as the likeliest.
    seed: None (or -1) draws one for each request.
    stop: strings that end the answer, which does not hold them unless include_stop_str_in_output.
    stop_token_ids: further tokens that end it.
    ignore_eos: go on past the model's own end tokens.
    min_tokens: no EOS, stop token or stop string before that many.
    max_tokens: longest answer; None is all the room left; 0 only scores the prompt.
    logprobs: that many of the likeliest tokens at each place of the answer; -1 is the whole vocabulary.
    prompt_logprobs: likewise for the prompt.
    logit_bias: token id -> what is added to its logit, in [-100, 100].
    allowed_token_ids: only these.
    bad_words: never these texts.
    bad_words_ids: the same as token ids; the client adds those of bad_words.
    structured_outputs: the shape that the answer must have.
    structured_after: token ids; the answer is free until they have come in this order (the end of a model's
        reasoning), and has that shape behind them.
    logprobs_mode: what logprobs are, see `LOGPROBS_MODES`; None is the engine's (`--logprobs-mode`).
    logprob_token_ids: the logprobs of these tokens too, at most 128; they have no rank.
    repetition_detection: ends an answer that repeats itself, see RepetitionDetectionParams.
    thinking_token_budget: that many tokens of reasoning, then its end mark is forced; -1 is no limit. The marks are
        `<think>` and `</think>`, or structured_after for the end.
    extra_args: name of a logits processor -> its argument (`vllm_xargs` in the API).
    truncate_prompt_tokens: that many tokens of the prompt are kept; -1 keeps what leaves room for the answer.
    truncation_side: where they are dropped: "left" (as None) or "right".
    skip_reading_prefix_cache: compute the whole prompt. Requests with prompt_logprobs always do.
    use_beam_search: the n best of best_of beams (`LLM.beam_search` offline); all answers come at the end.
    best_of: beams; n by default.
    length_penalty: of beams, see BeamSearchParams.
    early_stopping: of beams, see BeamSearchParams.
    spaces_between_special_tokens: taken and without effect: the tokenizers used here put none.
    include_stop_str_in_output: the text holds the stop string, or the stop token's text.
    skip_special_tokens: the text holds no special tokens.
    detokenize: give text, not token ids alone.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    structured_outputs: StructuredOutputs | None = None
    structured_after: tuple[int, ...] = ()
    logprobs_mode: str | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    skip_reading_prefix_cache: bool | None = None
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        # Offline users pass lists and one string; a frozen Struct takes the canonical form here.
        force = msgspec.structs.force_setattr
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        force(self, "stop", stop)
        force(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        force(self, "structured_after", tuple(self.structured_after or ()))
        force(self, "bad_words", tuple(self.bad_words or ()))
        force(self, "bad_words_ids", tuple(tuple(w) for w in self.bad_words_ids or ()))
        if self.allowed_token_ids is not None:
            force(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logprob_token_ids is not None:
            force(self, "logprob_token_ids", tuple(dict.fromkeys(self.logprob_token_ids)))
            force(self, "logprobs", self.logprobs or 0)
        if isinstance(self.repetition_detection, dict):
            force(self, "repetition_detection", repetition_params(self.repetition_detection))
        if self.top_k == -1:
            force(self, "top_k", 0)
        if self.thinking_token_budget == -1:
            force(self, "thinking_token_budget", None)
        if self.seed == -1:
            force(self, "seed", None)
        self._check()

    def _check(self) -> None:
        for name, limits in RANGES.items():
            value = getattr(self, name)
            if value is DEFAULTS[name] or (value is None and limits.optional):
                continue  # requests leave most as they are, and each is checked wherever it arrives
            if limits.kind is int:
                integer(value, name, low=limits.low, high=limits.high)
            else:
                number(value, name, low=limits.low, high=limits.high, above=limits.above)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError("stop must hold non-empty strings", field="stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", field="stop")
        for name in ("stop_token_ids", "allowed_token_ids", "structured_after", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                integer(token, name, low=0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", field="allowed_token_ids")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise RequestError(
                f"structured_outputs must be StructuredOutputs, not {type(self.structured_outputs).__name__}",
                field="structured_outputs",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", field="min_tokens"
            )
        for token, bias in (self.logit_bias or {}).items():
            integer(token, "logit_bias", low=0)
            number(bias, "logit_bias", low=-100.0, high=100.0)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words may hold at most {MAX_BAD_WORDS} entries", field="bad_words")
        for word in self.bad_words:
            if not isinstance(word, str) or not word:
                raise RequestError("bad_words must hold non-empty strings", field="bad_words")
        self._check_extras()

    def _check_extras(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) is not DEFAULTS[name]:
                one_of(value, name, choices)
        if len(self.logprob_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"logprob_token_ids may hold at most {MAX_LOGPROB_TOKEN_IDS} ids", field="logprob_token_ids"
            )
        wanted = self.repetition_detection
        if wanted is not None and not isinstance(wanted, RepetitionDetectionParams):
            raise RequestError(
                f"repetition_detection must be RepetitionDetectionParams, not {wanted!r}",
                field="repetition_detection",
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be at least 1, or -1", field="truncate_prompt_tokens")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of ({self.best_of}) must be at least n ({self.n})", field="best_of")
        if self.best_of not in (None, self.n) and not self.use_beam_search:
            raise RequestError("best_of other than n needs use_beam_search", field="best_of")
        if self.extra_args is not None:
            if not isinstance(self.extra_args, dict):
                raise RequestError(f"extra_args must be an object, not {self.extra_args!r}", field="extra_args")
            plain(self.extra_args, "extra_args")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken: below this temperature the softmax is one-hot in float32."""
        return self.temperature < 1e-5

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError for token ids that the model does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "structured_after", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise RequestError(f"{name} holds token id {token}, the vocabulary has {vocab_size}", field=name)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise RequestError(f"{name} exceeds the vocabulary of {vocab_size}", field=name)


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def integer(value: Any, field: str, *, low: float | None = None, high: float | None = None) -> None:
    """Raise RequestError unless value is an int (not a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{field} must be an integer, not {value!r}", field=field)
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{field} must be {limits}, not {value}", field=field)


def number(value: Any, field: str, *, low: float, high: float | None = None, above: bool = False) -> None:
    """Raise RequestError unless value is a finite number in [low, high], or (low, high] when `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{field} must be a finite number, not {value!r}", field=field)
    if value < low or (above and value == low) or (high is not None and value > high):
        left = "(" if above else "["
        limits = f"in {left}{low}, {high}]" if high is not None else f"{'above' if above else 'at least'} {low}"
        raise RequestError(f"{field} must be {limits}, not {value}", field=field)


def one_of(value: Any, field: str, choices: Sequence[Any]) -> None:
    """Raise RequestError unless value is one of the choices (and of its type: 1 is not True)."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        known = ", ".join(str(choice) for choice in choices if choice is not None)
        raise RequestError(f"{field} must be one of {known}, not {value!r}", field=field)


def plain(value: Any, field: str, *, depth: int = 0) -> None:
    """Raise RequestError unless value is made of what a message can carry: JSON, with integers of 64 bits."""
    if depth > 8:
        raise RequestError(f"{field} is nested too deeply", field=field)
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RequestError(f"{field} has the key {key!r}, which is no string", field=field)
            plain(item, f"{field}.{key}", depth=depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            plain(item, f"{field}[{index}]", depth=depth + 1)
    elif isinstance(value, bool | str | None):
        return
    elif isinstance(value, int):
        integer(value, field, low=-SEED_LIMIT, high=SEED_LIMIT - 1)
    else:
        number(value, field, low=-math.inf)


def repetition_params(given: dict[str, Any]) -> RepetitionDetectionParams:
    """From a body's object. Raises RequestError for an unknown name."""
    known = RepetitionDetectionParams.__struct_fields__
    for name in given:
        if name not in known:
            field = f"repetition_detection.{name}"
            raise RequestError(f"{field} is not known; known: {', '.join(known)}", field=field)
    return RepetitionDetectionParams(**given)
