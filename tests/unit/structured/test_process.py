"""The grammar process's loop, run on a thread over a pair of sockets, with libraries that misbehave on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from octavo.structured.compile import Library
from octavo.structured.matcher import Unsupported, Words
from octavo.structured.messages import (
    Ask,
    Close,
    Fill,
    Filled,
    Open,
    Ready,
    Refused,
    Started,
    decode_from_process,
    encode,
)
from octavo.structured.process import GrammarServer
from octavo.structured.spec import StructuredOutputs

VOCAB = 40


@dataclass
class OneToken:
    """Allows token 7 only, for ever."""

    def accept(self, tokens) -> int:
        return next((place for place, token in enumerate(tokens) if token != 7), len(tokens))

    def rollback(self, count: int) -> None: ...

    def fill(self, words: Words) -> None:
        words[:] = [1 << 7, 0]


@dataclass
class OneTokenCompiled:
    backend: str = "xgrammar"
    size: int = 100

    def matcher(self) -> OneToken:
        return OneToken()


class Moody:
    """Does what the regex says."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, spec: StructuredOutputs) -> OneTokenCompiled:
        assert spec.regex is not None
        if spec.regex == "slow":
            time.sleep(60)
        if spec.regex == "bad":
            raise Unsupported("it is bad")
        self.compiled.append(spec.regex)
        return OneTokenCompiled()


class Served:
    def __init__(self, connection: Connection, library: Moody) -> None:
        self.connection, self.library = connection, library

    def tell(self, message) -> None:
        self.connection.send_bytes(encode(message))

    def open(self, number: int, regex: str) -> None:
        spec = StructuredOutputs(regex=regex, backend="xgrammar")
        self.tell(Open(number=number, spec=spec, ends=(2,), after=()))

    def hear(self):
        assert self.connection.poll(20), "nothing came"
        return decode_from_process(self.connection.recv_bytes())


@pytest.fixture
def served() -> Iterator[Served]:
    ours, theirs = Pipe()
    library = Moody()
    libraries: dict[str, Library] = {"xgrammar": library, "guidance": library}
    server = GrammarServer(theirs, libraries, num_tokens=VOCAB, timeout=1.5, cache_bytes=250)
    thread = threading.Thread(target=server.serve)
    thread.start()
    case = Served(ours, library)
    assert isinstance(case.hear(), Started)
    yield case
    ours.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_grammar_is_compiled_once_and_followed(served: Served) -> None:
    served.open(1, "a")
    first = served.hear()
    assert (type(first), first.number, first.backend) == (Ready, 1, "xgrammar")
    assert first.seconds > 0
    served.open(2, "a")
    assert served.hear() == Ready(number=2, backend="xgrammar", seconds=0.0)
    assert served.library.compiled == ["a"]
    served.tell(Fill((Ask(1, (7, 7)), Ask(2, ()))))
    filled = served.hear()
    assert isinstance(filled, Filled)
    assert (filled.states, filled.errors) == (bytes(2), {})
    assert np.frombuffer(filled.words, "<i4").tolist() == [1 << 7, 0] * 2


def test_a_slow_grammar_is_given_up_while_others_are_served(served: Served) -> None:
    served.open(1, "slow")
    served.open(2, "a")
    assert isinstance(served.hear(), Ready)
    served.tell(Fill((Ask(2, ()),)))
    assert isinstance(served.hear(), Filled)
    refused = served.hear()
    assert isinstance(refused, Refused)
    assert (refused.number, refused.field) == (1, "structured_outputs.regex")
    assert "1.5 s" in refused.message
    # It is known from now on.
    began = time.monotonic()
    served.open(3, "slow")
    assert served.hear().number == 3
    assert time.monotonic() - began < 1.5


def test_a_refusal_reaches_all_who_wait_for_it(served: Served) -> None:
    served.open(1, "bad")
    served.open(2, "bad")
    assert [(type(m), m.number) for m in (served.hear(), served.hear())] == [(Refused, 1), (Refused, 2)]


def test_a_forbidden_token_and_a_forgotten_answer_are_errors_of_their_own(served: Served) -> None:
    for number in (1, 2, 3):
        served.open(number, "a")
        assert isinstance(served.hear(), Ready)
    served.tell(Close((2,)))
    served.tell(Fill((Ask(1, (8,)), Ask(2, ()), Ask(3, (7,)))))
    filled = served.hear()
    assert set(filled.errors) == {1, 2}
    assert len(filled.states) == 1


def test_compiled_grammars_are_kept_up_to_a_size(served: Served) -> None:
    for number, regex in enumerate("abca"):
        served.open(number, regex)
        assert isinstance(served.hear(), Ready)
    assert served.library.compiled == ["a", "b", "c", "a"]
