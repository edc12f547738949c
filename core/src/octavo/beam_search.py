"""Beam search, above the engine: every step asks it for one more token of each beam. Names as in vLLM.

    beams ─ one request of one token each ─> engine ─> each beam's likeliest tokens ─> the best `beam_width` go on

The engine finds a beam's past in the prefix cache, so a step computes little more than the new tokens. Here is only the
search; `LLM.beam_search` and `octavo.server.beam_search` drive it.

The search is that of Hugging Face's `generate(num_beams=...)`: of the candidates, ordered by the sum of logprobs, the
first `beam_width` that end are kept as finished, the best that do not end go on, and finished ones compete by
sum / length ** length_penalty, with the length of the answer alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from octavo.detokenizer import StopMatcher
from octavo.engine.door import Door, Prepared
from octavo.engine.logprobs import FLOOR
from octavo.errors import EngineError, RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling.params import SamplingParams

REFUSED = (
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "bad_words_ids",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
    "extra_args",
)
"""What looks at the answer so far: each token of a beam is a request of its own, to which the past is the prompt."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `LLM.beam_search`. Raises RequestError naming the field when a value is out of range.

    beam_width: beams kept, and answers given. max_tokens: longest answer.
    temperature: scales the logits that scores are made of; 0 is the model's own, as 1 is.
    length_penalty: finished answers compete by sum of logprobs / length ** length_penalty: above 0 longer ones gain.
    early_stopping: True ends as soon as beam_width answers are finished; False when the best open beam, as long as it
        is, cannot beat the worst of them; "never" when it could not at any length.
    stop, stop_token_ids, ignore_eos, min_tokens, include_stop_str_in_output, allowed_token_ids, skip_special_tokens:
        as in SamplingParams.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self) -> SamplingParams:
        """The same as SamplingParams."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name != "beam_width"}
        try:
            return SamplingParams(n=self.beam_width, use_beam_search=True, **given)
        except RequestError as error:
            if error.field == "n":
                raise RequestError(str(error).replace("n must", "beam_width must", 1), field="beam_width") from None
            raise


@dataclass
class BeamSearchSequence:
    """An answer. tokens: prompt and answer, a stop token included. text: of both, without stop token or stop string
    unless include_stop_str_in_output. logprobs: for each token of the answer the likeliest ones, its own first."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer on its way. score: what finished ones compete by."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] = ()
    total: float = 0.0
    score: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Candidate(NamedTuple):
    total: float
    beam: Beam
    token: int
    entry: dict[int, Logprob]


@dataclass
class BeamSearch:
    """The search for one prompt: while not `done`, `requests` are to be answered and the answers go to `advance`.

    params: with use_beam_search. prepared: the prompt, checked with `checked_as_sampled(params)` by this door.
    num_logprobs: how many of a token's likeliest ones answers keep beside its own; None is all that were looked at.
    Raises RequestError for parameters that cannot be used here.
    """

    params: SamplingParams
    prepared: Prepared
    door: Door
    num_logprobs: int | None = None
    done: bool = False
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Beam] = field(default_factory=list)

    def __post_init__(self) -> None:
        params, defaults = self.params, SamplingParams()
        for name in REFUSED:
            if getattr(params, name) not in (getattr(defaults, name), {}):
                raise RequestError(f"{name} cannot be used with beam search", field=name)
        if self.prepared.max_tokens < 1:
            raise RequestError("beam search needs max_tokens of at least 1", field="max_tokens")
        self.width = params.best_of or params.n
        self.num_candidates = max(2, 1 + len(self.prepared.eos)) * self.width
        self.step_params = msgspec.structs.replace(
            checked_as_sampled(params),
            max_tokens=1,
            min_tokens=0,
            # A number of its own: what an operator allows clients to see does not limit a search.
            logprobs=min(max(self.num_candidates, params.logprobs or 0), self.door.info.vocab_size),
            # Whatever the engine's default is, scores are logprobs, of what masks and temperature leave.
            logprobs_mode="processed_logprobs",
            prompt_logprobs=None,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=0,
            stop=(),
            stop_token_ids=(),
            ignore_eos=True,
            detokenize=False,
            truncate_prompt_tokens=None,
        )
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens: int | None = None

    @property
    def cache_salt(self) -> str:
        return self.prepared.salt.decode("utf-8", "surrogatepass")

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        """Token ids to be continued by one token each, and how."""
        params = self.step_params
        if self._num_cached_tokens is None and self.params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=self.params.prompt_logprobs)
        return [([*self.prepared.token_ids, *beam.tokens], params) for beam in self.running]

    def advance(self, answers: Sequence[RequestOutput]) -> None:
        """Take one step: answers in the order of `requests`. Raises EngineError if no answer is possible."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = answers[0].num_cached_tokens
            self._prompt_logprobs = answers[0].prompt_logprobs
        found: list[_Candidate] = []
        for beam, answer in zip(self.running, answers, strict=True):
            (entry,) = answer.outputs[0].logprobs or ({},)
            # An entry also holds the token drawn, which may be no likely one: so lists differ in length.
            found += [
                _Candidate(beam.total + one.logprob, beam, token, entry)
                for token, one in entry.items()
                if one.rank is not None and one.rank <= self.num_candidates and one.logprob > FLOOR
            ]
        found.sort(key=lambda candidate: -candidate.total)
        candidates = [self._extend(candidate) for candidate in found[: self.num_candidates]]
        length = len(self.running[0].tokens) + 1
        if length < self.params.min_tokens:
            candidates = [beam for beam in candidates if beam.finish_reason != "stop"]
        ended = [beam for beam in candidates[: self.width] if beam.finish_reason is not None]
        if not (self.params.early_stopping is True and len(self.finished) == self.width):
            self.finished = sorted((*self.finished, *ended), key=lambda beam: -beam.score)[: self.width]
        self.running = [beam for beam in candidates if beam.finish_reason is None][: self.width]
        self.done = not self.running or not self._worthwhile(length)
        if self.done and not self.finished:
            raise EngineError("beam search found no answer: every token is forbidden")

    def _worthwhile(self, length: int) -> bool:
        """Whether an open beam may still get among the finished ones."""
        if len(self.finished) < self.width:
            return True
        if self.params.early_stopping is True:
            return False
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.prepared.max_tokens
        return self._score(self.running[0].total, length) > self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.params.length_penalty)

    def _extend(self, candidate: _Candidate) -> Beam:
        total, beam, token, entry = candidate
        tokens = (*beam.tokens, token)
        own = {token: entry[token]}
        if self.num_logprobs is not None:
            most = self.num_logprobs
            entry = {id: one for id, one in entry.items() if one.rank is not None and one.rank <= most}
        finish_reason, stop_reason, text = self._end(tokens)
        return Beam(
            tokens=tokens,
            logprobs=(*beam.logprobs, own | entry),
            total=total,
            score=self._score(total, len(tokens)),
            text=text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _end(self, tokens: Sequence[int]) -> tuple[str | None, int | str | None, str]:
        """Whether an answer ends here and why; with its text if it does."""
        params, last = self.params, tokens[-1]
        if last in self.prepared.eos:
            shown = tokens if params.include_stop_str_in_output else tokens[:-1]
            silent = not params.ignore_eos and last in self.door.info.eos_token_ids
            return "stop", None if silent else last, self._text(shown)
        if params.stop and len(tokens) > params.min_tokens:
            matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output)
            text = matcher.push(self._text(tokens, whole=False))
            if matcher.matched is not None:
                return "stop", matcher.matched, text
        if len(tokens) >= self.prepared.max_tokens:
            return "length", None, self._text(tokens)
        return None, None, ""

    def _text(self, tokens: Sequence[int], *, whole: bool = True) -> str:
        """whole: no more tokens come, so that a character left unfinished is shown as such."""
        tokenizer = self.door.tokenizer
        if tokenizer is None or not self.params.detokenize:
            return ""
        detokenizer = tokenizer.detokenizer(
            skip_special_tokens=self.params.skip_special_tokens, prompt_ids=self.prepared.token_ids
        )
        text = detokenizer.push(tokens)
        return text + detokenizer.finish() if whole else text

    def result(self, request_id: str) -> RequestOutput:
        """The `n` best answers (fewer, if the allowed tokens leave no more), as if they had been sampled."""
        answers = []
        for index, beam in enumerate(self.finished[: self.params.n]):
            answer = CompletionOutput(
                index=index,
                text=beam.text,
                token_ids=list(beam.tokens),
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            if self.params.logprobs is not None:
                answer.logprobs, answer.cumulative_logprob = list(beam.logprobs), beam.total
            answers.append(answer)
        return RequestOutput(
            request_id=request_id,
            prompt=self.prepared.text,
            prompt_token_ids=self.prepared.token_ids,
            outputs=answers,
            finished=True,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens or 0,
        )

    def output(self) -> BeamSearchOutput:
        """All answers, as vLLM's offline API gives them."""
        prompt, tokenizer = self.prepared.token_ids, self.door.tokenizer
        head = self.prepared.text
        if head is None and tokenizer is not None:
            head = tokenizer.decode(prompt, skip_special_tokens=self.params.skip_special_tokens)
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    tokens=[*prompt, *beam.tokens],
                    logprobs=list(beam.logprobs),
                    cum_logprob=beam.total,
                    text=None if tokenizer is None or head is None else head + beam.text,
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                )
                for beam in self.finished
            ]
        )


def checked_as_sampled(params: SamplingParams) -> SamplingParams:
    """The parameters of one beam, as the door takes them."""
    return msgspec.structs.replace(params, n=1, best_of=None, use_beam_search=False)
