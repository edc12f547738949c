"""What a request gives back: names as in vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token's log probability. rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the `n` answers of a request.

    logprobs: per generated token, token id -> Logprob (the chosen token and the top ones), if asked for.
    finish_reason: "stop", "length", "repetition", "abort", "error", or None while running.
    stop_reason: the stop string or stop token id that ended it; None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Where a request's time went, in seconds. None: it did not get so far.

    queue: arrival to its first place in the batch. prefill: from there to the first token. decode: from there to the
    last. first_token: arrival to first token. total: arrival to end.
    """

    total: float
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    first_token: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers. prompt_logprobs: per prompt token (the first is None), if asked for. metrics: of a
    server's finished request, else None.

    A stream yields these as deltas: `outputs` then holds only what is new since the last one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


class OutputMerger:
    """Joins the deltas of one request into a single RequestOutput, in work linear in their size."""

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None
        self._answers: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, delta: RequestOutput) -> None:
        """Append a delta. The delta itself is left as it is."""
        if self._whole is None:
            self._whole = replace(delta, outputs=[])
        whole = self._whole
        whole.finished = delta.finished
        whole.num_cached_tokens = delta.num_cached_tokens
        whole.metrics = delta.metrics
        if delta.prompt_logprobs is not None:
            whole.prompt_logprobs = delta.prompt_logprobs
        for new in delta.outputs:
            answer = self._answers.setdefault(new.index, CompletionOutput(index=new.index))
            self._texts.setdefault(new.index, []).append(new.text)
            answer.token_ids.extend(new.token_ids)
            if new.logprobs is not None:
                if answer.logprobs is None:
                    answer.logprobs = []
                answer.logprobs.extend(new.logprobs)
            answer.cumulative_logprob = new.cumulative_logprob
            answer.finish_reason, answer.stop_reason = new.finish_reason, new.stop_reason

    def result(self) -> RequestOutput | None:
        """Everything added so far, answers ordered by index; None if nothing was added."""
        if self._whole is None:
            return None
        for index, pieces in self._texts.items():
            self._texts[index] = ["".join(pieces)]
            self._answers[index].text = self._texts[index][0]
        self._whole.outputs = [self._answers[index] for index in sorted(self._answers)]
        return self._whole
