"""The two libraries that tokenize, behind one small face: `tokenizers` (Rust) and the Python code of Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import tokenizers

from octavo.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from octavo.token_bytes import TokenBytes, spelling_of


class Backend(Protocol):
    """vocab_size: highest id + 1."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None."""

    def id_of(self, token: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special or not."""

    def detokenizer(self, *, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> Detokenizer: ...


class FastBackend:
    """A `tokenizers.Tokenizer`, decoded by its bytes where its decoder allows that."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._spelling = spelling_of(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @cached_property
    def _tables(self) -> dict[bool, TokenBytes] | None:
        """Token bytes by "are special tokens skipped"; None if tokens have no bytes of their own."""
        if self._spelling is None:
            return None
        return {skip: TokenBytes(self._tokenizer, self._spelling, skip_special=skip) for skip in (False, True)}

    def token_bytes(self, token_id: int) -> bytes:
        if self._tables is not None:
            return self._tables[False][token_id]
        return (self.token(token_id) or "").encode()

    def detokenizer(self, *, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> Detokenizer:
        if self._tables is not None and self._spelling is not None:
            return ByteDetokenizer(
                self._tables[skip_special_tokens],
                strip_first=self._spelling.strip_first,
                prompt_ids=prompt_ids,
            )

        def decode(ids: list[int]) -> str:
            known = [i for i in ids if 0 <= i < self.vocab_size]
            return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, prompt_ids=prompt_ids)


class SlowBackend:
    """A tokenizer of Transformers that is written in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        piece: str | None = self._tokenizer.convert_ids_to_tokens(int(token_id))
        return piece

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        return self._decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(self, *, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> Detokenizer:
        def decode(ids: list[int]) -> str:
            return self._decode(ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode, prompt_ids=prompt_ids)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        known = [i for i in ids if 0 <= i < self.vocab_size]
        text: str = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """What the files of a model say. special_tokens: text by role ("bos_token", ...). eos_token_ids: beyond the role
    "eos_token". chat_templates: source by name, "default" for the usual one. response_template: how to read answers, as
    Transformers describes it."""

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    response_template: Mapping[str, Any] | None = None
