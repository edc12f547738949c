"""Logprobs in the two shapes of OpenAI: parallel lists (completions) and one record a token (chat)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.outputs import Logprob
from octavo.server.openai.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

FLOOR = -9999.0
"""JSON has no -inf: what is impossible gets this, everywhere."""

Row = Mapping[int, Logprob]


class TokenNames:
    """How tokens are written: as text, or as `token_id:N` where asked for or where there is no text."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    @property
    def without_text(self) -> bool:
        """Whether there is no tokenizer, so that only ids can be shown."""
        return self._tokenizer is None

    def name(self, token: int, text: str | None = None) -> str:
        """How the token is written; `text` is its text where that is known already."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token) if text is None else text

    def bytes(self, token: int) -> list[int] | None:
        """The token's true bytes, or None without a tokenizer."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


class CompletionLogprobsWriter:
    """Writes the tokens of one choice, piece after piece, keeping count of the text offset."""

    def __init__(self, names: TokenNames, *, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._offset = 0

    def write(self, tokens: Sequence[int], rows: Sequence[Row | None]) -> CompletionLogprobs:
        """rows: per token its logprobs; None for a first prompt token, which nothing predicted."""
        out = CompletionLogprobs()
        for token, row in zip(tokens, rows, strict=True):
            name = self._names.name(token, None if row is None else row[token].decoded_token)
            out.text_offset.append(self._offset)
            out.tokens.append(name)
            out.token_logprobs.append(None if row is None else finite(row[token].logprob))
            out.top_logprobs.append(None if row is None else self._top(token, row))
            self._offset += len(name)
        return out

    def _top(self, chosen: int, row: Row) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, entry in row.items():
            if token != chosen and not within(entry, self._num_top):
                continue
            name = self._names.name(token, entry.decoded_token)
            # Two tokens may look alike (parts of characters): none of them is lost.
            top[f"token_id:{token}" if name in top else name] = finite(entry.logprob)
        return top


def chat_logprobs(tokens: Sequence[int], rows: Sequence[Row], names: TokenNames, *, num_top: int) -> ChatLogprobs:
    """One record a token; top_logprobs holds the `num_top` likeliest, and the chosen one only if it is among them."""
    content = []
    for token, row in zip(tokens, rows, strict=True):
        ranked = [(entry.rank or len(row) + 1, other, entry) for other, entry in row.items() if within(entry, num_top)]
        top = [
            TopLogprob(names.name(other, entry.decoded_token), finite(entry.logprob), names.bytes(other))
            for _, other, entry in sorted(ranked)
        ]
        chosen = row[token]
        content.append(
            TokenLogprob(names.name(token, chosen.decoded_token), finite(chosen.logprob), names.bytes(token), top)
        )
    return ChatLogprobs(content)


def prompt_logprobs_json(rows: Sequence[Row | None], *, num_top: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of vLLM: per prompt token, token id -> its logprob, rank and text; null for the first.

    Rows may hold more than was asked for here (echo asks for its own number); the actual token, the first, stays.
    """
    return [
        None
        if row is None
        else {
            str(token): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for place, (token, entry) in enumerate(row.items())
            if place == 0 or within(entry, num_top)
        }
        for row in rows
    ]


def within(entry: Logprob, num_top: int) -> bool:
    """Whether an entry is one of the `num_top` likeliest (-1: all are), or was asked for by its id (it has no rank)."""
    return num_top == -1 or entry.rank is None or 1 <= entry.rank <= num_top


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)
