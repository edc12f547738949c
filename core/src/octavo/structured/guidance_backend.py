"""Grammars by llguidance: nothing is worked out ahead, and every step has a limit on its work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from octavo.structured import schema
from octavo.structured.matcher import MatchError, Unsupported, Words, one_line
from octavo.structured.spec import StructuredOutputs
from octavo.structured.vocabulary import Vocabulary

WHITESPACE = r"[ \t\n\r]{1,20}"
"""Whitespace between JSON tokens: bounded, as with xgrammar."""


class Guidance:
    """Compiles for one vocabulary. encode: text -> token ids, for text that a grammar forces."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary, encode))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(vocabulary.texts))

    def compile(self, spec: StructuredOutputs) -> GuidanceCompiled:
        """Raises Unsupported with the library's reason."""
        try:
            grammar = _grammar(spec)
        except (ValueError, RuntimeError, GbnfToLarkError) as error:
            raise Unsupported(one_line(error)) from None
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise Unsupported(one_line(matcher.get_error()))
        return GuidanceCompiled(start=matcher, size=len(grammar))


def _grammar(spec: StructuredOutputs) -> str:
    make = llguidance.LLMatcher
    if spec.kind in ("json", "json_object"):
        source: object = {"type": "object"}
        if spec.json is not None:
            source = schema.closed(json.loads(str(spec.json)), every=spec.disable_additional_properties)
        compact = spec.disable_any_whitespace
        # Overrides, as a schema could set these itself ("x-guidance").
        return make.grammar_from_json_schema(
            json.dumps(source),
            overrides={
                "whitespace_flexible": not compact,
                "whitespace_pattern": None if compact else spec.whitespace_pattern or WHITESPACE,
                "item_separator": ", " if compact else ",",
                "key_separator": ": " if compact else ":",
                "coerce_one_of": False,
                "lenient": False,
            },
        )
    if spec.regex is not None:
        return make.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        # One terminal of all texts is one automaton; as many rules would be that many parses side by side.
        return make.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, spec.choice))}")
    if spec.grammar is not None:
        return make.grammar_from_lark(gbnf_to_lark(spec.grammar) if "::=" in spec.grammar else spec.grammar)
    raise ValueError("structural_tag needs the backend xgrammar")


class _Tokens:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.eos_token_id = vocabulary.end
        self.bos_token_id = None
        self.tokens = vocabulary.texts
        self.special_token_ids = [token for token, text in enumerate(vocabulary.texts) if not text]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


@dataclass(frozen=True, kw_only=True)
class GuidanceCompiled:
    """Implements `octavo.structured.matcher.Compiled`. start: a matcher that has taken nothing."""

    start: llguidance.LLMatcher
    size: int
    backend: str = "guidance"

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.start.deep_copy())


class GuidanceMatcher:
    """Implements `octavo.structured.matcher.Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, tokens: Sequence[int]) -> int:
        return self._matcher.try_consume_tokens(list(tokens))

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def fill(self, words: Words) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise MatchError(one_line(self._matcher.get_error()))
