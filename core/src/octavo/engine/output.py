"""One answer as it grows: sampled token ids in, text and logprobs out. Work per token does not grow with the answer.

ids ──> detokenizer ──> stop strings ──> text that is safe to show
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.detokenizer import StopMatcher
from octavo.engine.logprobs import entries
from octavo.engine.messages import Finish, LogprobBlock
from octavo.outputs import CompletionOutput
from octavo.sampling.params import SamplingParams

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

FINISH_REASONS = {
    Finish.RUNNING: None,
    Finish.STOP: "stop",
    Finish.COMPLETE: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "abort",
    Finish.ERROR: "error",
    Finish.REPETITION: "repetition",
}


class Answer:
    """The state of one of a request's n answers between two deltas.

    A stop token (EOS or one of stop_token_ids) is in token_ids, but not in the text unless
    include_stop_str_in_output. Ids behind a stop string are dropped. Text of the first min_tokens tokens is not
    searched for stop strings.
    """

    def __init__(
        self,
        *,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        token_text: Callable[[int], str] | None,
        prompt_ids: Sequence[int],
        silent_stops: Sequence[int],
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self.last_token_at = 0.0
        self._params = params
        self._silent_stops = frozenset(silent_stops)
        self._token_text = token_text
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids
            )
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._sum = 0.0
        self._plain = self._matcher is None and params.logprobs is None

    def push(self, tokens: list[int], finish: Finish, block: LogprobBlock | None) -> CompletionOutput:
        """What these tokens add. `finish` is the engine's word; a stop string found here overrules it."""
        if self._plain and not finish:  # nearly every token of nearly every answer
            self.num_tokens += len(tokens)
            text = "" if self._detokenizer is None else self._detokenizer.push(tokens)
            return CompletionOutput(self.index, text, tokens)
        shown = tokens
        if finish is Finish.STOP and not self._params.include_stop_str_in_output:
            shown = tokens[:-1]
        text, num_used = self._text(shown, last=finish is not Finish.RUNNING)
        stop_string = None if self._matcher is None else self._matcher.matched
        output = CompletionOutput(index=self.index, text=text, token_ids=tokens)
        if stop_string is not None:
            if num_used is not None:
                output.token_ids = tokens[:num_used]
            output.finish_reason, output.stop_reason = "stop", stop_string
        elif finish is not Finish.RUNNING:
            output.finish_reason = FINISH_REASONS[finish]
            if finish is Finish.STOP and tokens and tokens[-1] not in self._silent_stops:
                output.stop_reason = tokens[-1]
        self.num_tokens += len(output.token_ids)
        self.finished = output.finish_reason is not None
        if self._params.logprobs is not None:
            found = [] if block is None else entries(block, self._token_text, num_top=self._params.logprobs)
            output.logprobs = found[: len(output.token_ids)]
            for entry in output.logprobs:
                self._sum += next(iter(entry.values())).logprob
            output.cumulative_logprob = self._sum
        return output

    def end(self, reason: str) -> CompletionOutput:
        """The last delta of an answer that is cut off from outside, with the text that was held back."""
        self.finished = True
        text, _ = self._text([], last=True)
        return CompletionOutput(
            index=self.index,
            text=text,
            logprobs=None if self._params.logprobs is None else [],
            cumulative_logprob=None if self._params.logprobs is None else self._sum,
            finish_reason=reason,
        )

    def _text(self, tokens: Sequence[int], *, last: bool) -> tuple[str, int | None]:
        """Text to show, and how many of the tokens it took to complete a stop string (None: not within them)."""
        if self._detokenizer is None:
            return "", None
        if self._matcher is None:
            text = self._detokenizer.push(tokens)
            return (text + self._detokenizer.finish() if last else text), None
        pieces = []
        for place, token in enumerate(tokens, start=1):
            piece = self._detokenizer.push((token,))
            if self.num_tokens + place > self._params.min_tokens:
                piece = self._matcher.push(piece)
            pieces.append(piece)
            if self._matcher.matched is not None:
                return "".join(pieces), place
        if last:
            pieces.append(self._matcher.push(self._detokenizer.finish()))
            if self._matcher.matched is None:
                pieces.append(self._matcher.finish())
        return "".join(pieces), None
