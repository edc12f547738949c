"""Grammars compiled by xgrammar: all masks that do not depend on context are worked out ahead."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xgrammar

from octavo.structured import schema
from octavo.structured.matcher import Unsupported, Words, one_line
from octavo.structured.spec import StructuredOutputs
from octavo.structured.vocabulary import Vocabulary

MAX_WHITESPACE = 20
"""Most whitespace characters in one place of a JSON text: a model may not fill its answer with them."""
SOURCE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")
ANY_OBJECT = '{"type":"object"}'


class XGrammar:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = _compiler(vocabulary.texts, vocabulary.end)
        self._tagged = _compiler(vocabulary.tagged, vocabulary.end)

    def compile(self, spec: StructuredOutputs) -> XGrammarCompiled:
        """Raises Unsupported with the library's reason."""
        try:
            grammar = self._compile(spec)
        except (RuntimeError, ValueError, TypeError) as error:
            raise Unsupported(SOURCE.sub("", one_line(error))) from None
        return XGrammarCompiled(grammar=grammar, size=grammar.memory_size_bytes)

    def _compile(self, spec: StructuredOutputs) -> Any:
        if spec.kind in ("json", "json_object"):
            source = str(spec.json or ANY_OBJECT)
            if spec.json is not None and spec.disable_additional_properties:
                source = json.dumps(schema.closed(json.loads(source), every=True))
            return self._texts.compile_json_schema(
                source,
                any_whitespace=not spec.disable_any_whitespace,
                max_whitespace_cnt=None if spec.disable_any_whitespace else MAX_WHITESPACE,
            )
        if spec.regex is not None:
            return self._texts.compile_regex(spec.regex)
        if spec.choice is not None:
            rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice)
            return self._texts.compile_grammar(f"root ::= {rule}")
        if spec.grammar is not None:
            if "::=" in spec.grammar:
                return self._texts.compile_grammar(spec.grammar)
            return self._texts.compile_lark(spec.grammar)
        assert isinstance(spec.structural_tag, str)
        return self._tagged.compile_structural_tag(spec.structural_tag)


def _compiler(tokens: list[bytes], end: int) -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[end])
    # One thread: it compiles beside a serving engine. Octavo caches by spec.
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@dataclass(frozen=True, kw_only=True)
class XGrammarCompiled:
    """Implements `octavo.structured.matcher.Compiled`."""

    grammar: Any
    size: int
    backend: str = "xgrammar"

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self.grammar))


class XGrammarMatcher:
    """Implements `octavo.structured.matcher.Matcher`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if not self._matcher.accept_token(token):
                return count
        return len(tokens)

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def fill(self, words: Words) -> None:
        self._matcher.fill_next_token_bitmask(words[None], 0)
