"""Both grammar libraries over a small vocabulary, and answers drawn from what they allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.structured.answer import ShapedAnswer, State
from octavo.structured.compile import Library
from octavo.structured.matcher import Compiled
from octavo.structured.vocabulary import Vocabulary, read_vocabulary
from octavo.testing.tiny import make_tokenizer
from octavo.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """As for a model whose logits are wider than its tokenizer's vocabulary."""
    return read_vocabulary(tokenizer, vocab_size=tokenizer.vocab_size + 21, ends=[2])


@pytest.fixture(scope="session")
def libraries(tokenizer: Tokenizer, vocabulary: Vocabulary) -> dict[str, Library]:
    from octavo.structured.guidance_backend import Guidance
    from octavo.structured.xgrammar_backend import XGrammar

    return {
        "xgrammar": XGrammar(vocabulary),
        "guidance": Guidance(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False)),
    }


def allowed(words: np.ndarray) -> list[int]:
    """The tokens of a mask."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@pytest.fixture(scope="session")
def draw(vocabulary: Vocabulary) -> Callable[[Compiled, int], str | None]:
    """(compiled, seed) -> `draw_answer` over the vocabulary."""
    return lambda compiled, seed: draw_answer(compiled, vocabulary, seed=seed)


def draw_answer(
    compiled: Compiled, vocabulary: Vocabulary, *, seed: int, end: int = 2, max_tokens: int = 400
) -> str | None:
    """An answer of tokens drawn at random from what the grammar allows; None if it did not end. It ends where it may,
    half of the time, and is in a hurry to close what is open."""
    rng = random.Random(seed)
    answer = ShapedAnswer(compiled.matcher(), num_tokens=vocabulary.end, ends=[end])
    words = np.empty((1, vocabulary.num_words), np.int32)
    text = b""
    for step in range(max_tokens):
        (state,) = answer.masks(words, may_end=True)
        if state is State.DONE:
            return text.decode()
        tokens = allowed(words[0])
        assert tokens, "a mask allows something"
        if end in tokens and (len(tokens) == 1 or rng.random() < 0.5):
            return text.decode()
        tokens = [token for token in tokens if token != end]
        closing = [token for token in tokens if vocabulary.texts[token] in (b'"', b"}", b"]")]
        token = rng.choice(closing if closing and rng.random() < step / 40 else tokens)
        answer.accept([token])
        text += vocabulary.texts[token]
    return None
