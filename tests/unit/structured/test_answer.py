"""One answer and its masks: ends, marks before which it is free, drafts and what is taken back."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.structured.answer import ShapedAnswer, State
from octavo.structured.compile import Library, compile_spec
from octavo.structured.matcher import MatchError
from octavo.structured.spec import StructuredOutputs
from octavo.structured.vocabulary import Vocabulary
from octavo.tokenizer import Tokenizer

END, OTHER_END = 2, 5


def allowed(words: np.ndarray) -> list[int]:
    """The tokens of a mask."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


class Case:
    """Answers of one grammar."""

    def __init__(self, libraries: dict[str, Library], vocabulary: Vocabulary, name: str) -> None:
        self.libraries, self.vocabulary, self.name = libraries, vocabulary, name
        self.tokens = {data: token for token, data in enumerate(vocabulary.texts) if len(data) == 1}

    def of(self, text: str) -> list[int]:
        return [self.tokens[bytes([byte])] for byte in text.encode()]

    def answer(self, regex: str, *, ends: tuple[int, ...] = (END,), after: tuple[int, ...] = ()) -> ShapedAnswer:
        compiled = compile_spec(StructuredOutputs(regex=regex, backend=self.name), self.libraries)  # type: ignore[arg-type]
        return ShapedAnswer(compiled.matcher(), num_tokens=self.vocabulary.end, ends=ends, after=after)

    def masks(self, answer: ShapedAnswer, *, may_end: bool = True, drafts: str = "") -> list[set[int] | State]:
        """For each position, its tokens, or the state if there is no mask."""
        words = np.zeros((1 + len(drafts), self.vocabulary.num_words), np.int32)
        states = answer.masks(words, may_end=may_end, drafts=self.of(drafts))
        return [set(allowed(w)) if s is State.MASKED else s for w, s in zip(words, states, strict=True)]


@pytest.fixture(params=["xgrammar", "guidance"])
def case(request: pytest.FixtureRequest, libraries: dict[str, Library], vocabulary: Vocabulary) -> Case:
    return Case(libraries, vocabulary, request.param)


def test_an_answer_may_end_only_where_its_grammar_does(case: Case) -> None:
    answer = case.answer("ab*", ends=(END, OTHER_END))
    assert case.masks(answer) == [set(case.of("a"))]
    answer.accept(case.of("a"))
    assert case.masks(answer) == [{*case.of("b"), END, OTHER_END}]


def test_a_whole_answer_is_done(case: Case) -> None:
    answer = case.answer("ab")
    answer.accept(case.of("ab"))
    assert case.masks(answer) == [State.DONE]
    assert case.masks(answer, may_end=False) == [State.DONE]


def test_an_end_that_comes_too_early_is_held_off_while_there_is_something_else(case: Case) -> None:
    answer = case.answer("ab*")
    answer.accept(case.of("a"))
    assert case.masks(answer, may_end=False) == [set(case.of("b"))]


def test_a_token_that_the_grammar_forbids_is_an_error(case: Case) -> None:
    with pytest.raises(MatchError, match="forbids"):
        case.answer("ab").accept(case.of("ax"))


def test_nothing_behind_the_vocabulary_and_nothing_special_is_allowed(case: Case, tokenizer: Tokenizer) -> None:
    (tokens,) = case.masks(case.answer("(.|\n)*"))
    assert isinstance(tokens, set)
    assert max(tokens) < tokenizer.vocab_size
    assert tokens & tokenizer.special_ids == {END}


def test_each_draft_gets_the_mask_behind_it_and_leaves_no_trace(case: Case) -> None:
    answer = case.answer("abc")
    a, b, c = (set(case.of(letter)) for letter in "abc")
    assert case.masks(answer, drafts="ab") == [a, b, c]
    assert case.masks(answer, drafts="abc") == [a, b, c, State.DONE]
    # Behind a draft that does not fit nothing can be reached.
    assert case.masks(answer, drafts="axc") == [a, b, b, b]
    answer.accept(case.of("ab"))
    assert case.masks(answer) == [c]


def test_an_answer_is_free_but_may_not_end_until_its_mark_has_come(case: Case) -> None:
    mark = tuple(case.of("xy"))
    answer = case.answer("ab", after=mark)
    (tokens,) = case.masks(answer)
    assert isinstance(tokens, set)
    assert len(tokens) == case.vocabulary.end - 1
    assert END not in tokens
    answer.accept(case.of("zzx"))
    assert answer.is_free
    answer.accept(case.of("y"))
    assert not answer.is_free
    assert case.masks(answer) == [set(case.of("a"))]


def test_a_mark_that_comes_amid_tokens_or_drafts_begins_the_grammar_right_behind_it(case: Case) -> None:
    mark = tuple(case.of("xx"))
    answer = case.answer("ab", after=mark)
    answer.accept(case.of("x"))
    first, second, third, done = case.masks(answer, drafts="xab")
    assert len(first) > 2  # type: ignore[arg-type]
    assert [second, third, done] == [set(case.of("a")), set(case.of("b")), State.DONE]
    assert answer.is_free
    answer.accept(case.of("xa"))
    assert case.masks(answer) == [set(case.of("b"))]
