"""The bytes of a model's tokens, as grammar libraries need them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """texts: bytes of each token; empty for special tokens and for ids that have no token. tagged: the same, but
    special tokens other than those that end an answer have the bytes of their names, for tags that are made of them.

    Both have one entry more than the model's logits: `end`, which stands for the end of the text.
    """

    texts: list[bytes]
    tagged: list[bytes]

    @property
    def end(self) -> int:
        """An id that no model has."""
        return len(self.texts) - 1

    @property
    def num_words(self) -> int:
        """32-bit words of a mask over the model's logits."""
        return (self.end + 31) // 32


def read_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, ends: Collection[int]) -> Vocabulary:
    """The vocabulary of a tokenizer for logits of `vocab_size`. ends: ids that end an answer."""
    known = min(tokenizer.vocab_size, vocab_size)
    ends = {*ends, *tokenizer.eos_token_ids}
    tagged = [b"" if token in ends else tokenizer.token_bytes(token) for token in range(known)]
    tagged += [b""] * (vocab_size + 1 - known)
    texts = list(tagged)
    for token in tokenizer.special_ids:
        if token < known:
            texts[token] = b""
    return Vocabulary(texts=texts, tagged=tagged)
