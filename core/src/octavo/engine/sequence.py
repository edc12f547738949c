"""One request as the engine keeps it while it waits; while it runs, its numbers live in the `RequestTable`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.engine.messages import Submit
from octavo.errors import RequestError, RequestTooLargeError
from octavo.plugin.step import Ints
from octavo.sampling.repetition import RepetitionWatch

NO_TOKENS: Ints = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and what it has produced.

    limit: number of tokens (prompt and output) at which it ends as LENGTH.
    row: its place in the table, -1 while it waits.
    output: what it had generated when it was last preempted; the table holds the newer tokens.
    digests: prefix-cache digests of its full blocks, by block size; grown when needed.
    shaped: whether a grammar decides what it may sample (`octavo.engine.shapes`).
    cached: prompt tokens that the prefix cache served when it first ran.
    next_prompt_logprob: first prompt position whose logprobs were not sent yet (recomputing must not send them twice).
    prompt_done: the whole prompt was computed once.
    repetition: looks for the answer repeating itself, if the request asked for that.
    """

    submit: Submit
    prompt: Ints
    arrival: int
    limit: int
    row: int = -1
    ended: bool = False
    started: bool = False
    shaped: bool = False
    cached: int = 0
    output: Ints = field(default_factory=lambda: NO_TOKENS)
    digests: dict[int, list[bytes]] = field(default_factory=dict)
    next_prompt_logprob: int = 1
    prompt_done: bool = False
    repetition: RepetitionWatch | None = None

    @property
    def tokens(self) -> Ints:
        """Prompt and output up to the last preemption."""
        return np.concatenate((self.prompt, self.output)) if len(self.output) else self.prompt

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def samples(self) -> bool:
        """False if only the prompt is to be computed."""
        return self.submit.max_tokens > 0

    @property
    def num_positions(self) -> int:
        """Most positions whose keys and values it will ever hold: the last token of an answer is never computed."""
        return self.limit - 1 if self.samples else len(self.prompt)

    @property
    def uses_cache(self) -> bool:
        """Scores of prompt tokens need their logits, so those requests compute the whole prompt."""
        params = self.submit.params
        return params.prompt_logprobs is None and not params.skip_reading_prefix_cache


def open_sequence(submit: Submit, *, arrival: int, max_model_len: int, max_prompt: int | None) -> Sequence:
    """Check a request and make its sequence. max_prompt: most prompt tokens of one step if prompts may not be cut.

    Raises RequestError naming the field, RequestTooLargeError if it can never be served.
    """
    if not submit.tokens or len(submit.tokens) % 4:
        raise RequestError("the prompt must hold at least one token (int32 ids)", field="prompt")
    if submit.max_tokens < 0:
        raise RequestError(f"max_tokens must be at least 0, not {submit.max_tokens}", field="max_tokens")
    prompt = np.frombuffer(submit.tokens, dtype="<i4").astype(np.int32)  # a copy, as torch wants writable memory
    room = max_model_len - len(prompt)
    if room < min(1, submit.max_tokens):
        raise RequestTooLargeError(
            f"the prompt has {len(prompt)} tokens, the context holds {max_model_len} with the answer: shorten it",
            field="prompt",
        )
    if max_prompt is not None and len(prompt) > max_prompt:
        raise RequestTooLargeError(
            f"the prompt has {len(prompt)} tokens, one step takes {max_prompt}: shorten it, "
            "or raise max_num_batched_tokens or turn on enable_chunked_prefill",
            field="prompt",
        )
    wanted = submit.params.repetition_detection
    return Sequence(
        submit,
        prompt,
        arrival,
        limit=len(prompt) + min(submit.max_tokens, room),
        repetition=RepetitionWatch(wanted) if wanted is not None and wanted.on else None,
    )
