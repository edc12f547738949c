"""What is known of one HTTP request while it is served: for its log line, its key's limits and its trace.

The middleware opens an `Exchange` and closes it when the response has ended; the service writes into it what the
engine does. It is a context variable of the request's task, so that a route need not hand it through.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from octavo.sampling.params import SamplingParams
    from octavo.server.access import Key


@dataclass(kw_only=True, eq=False)
class Exchange:
    """One HTTP request. Times are of `time.monotonic`; first_token_at: of any of its answers.

    metrics: of each finished prompt. num_sequences: prompts times answers. key: None where no keys are asked for.
    status: 0 if the client left before there was one. trace: W3C trace context of the caller, by header.
    """

    request_id: str
    method: str
    path: str
    key: Key | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    model: str = ""
    params: SamplingParams | None = None
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    metrics: list[RequestMetrics] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    _entered: bool = False

    def enter(self) -> None:
        """It wants to use the model. Raises ApiError (429) if its key is over a limit; counted once."""
        if self.key is not None and not self._entered:
            self.key.enter()
            self._entered = True

    def leave(self) -> None:
        """The response has ended."""
        if self.key is not None and self._entered:
            self.key.leave()
            self._entered = False

    def hand_over(self) -> Exchange:
        """Another exchange, for work that goes on when the response has ended; it holds what this one has entered."""
        other = Exchange(request_id=self.request_id, method=self.method, path=self.path, key=self.key, trace=self.trace)
        other.model, other._entered, self._entered = self.model, self._entered, False
        return other

    def on_prompt(self, output: RequestOutput) -> None:
        """The first news of one of its prompts."""
        count = len(output.prompt_token_ids)
        self.num_prompt_tokens += count
        if self.key is not None:
            self.key.use_tokens(count)

    def on_output(self, output: RequestOutput) -> None:
        """A delta of one of its prompts."""
        count = sum(len(answer.token_ids) for answer in output.outputs)
        if count:
            if self.first_token_at is None:
                self.first_token_at = time.monotonic()
            self.num_generated_tokens += count
            if self.key is not None:
                self.key.use_tokens(count)
        self.finish_reasons += [a.finish_reason for a in output.outputs if a.finish_reason is not None]
        if output.finished:
            self.num_cached_tokens += output.num_cached_tokens
            if output.metrics is not None:
                self.metrics.append(output.metrics)


current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""The exchange of the running task; None outside of a request."""
