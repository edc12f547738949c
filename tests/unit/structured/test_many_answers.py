"""A request of many answers that is abandoned: all are forgotten in one pass, not each by a search among all."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe

import numpy as np
import pytest

from octavo.config import ModelConfig, StructuredConfig
from octavo.engine.messages import Abort, Submit
from octavo.engine.outbox import Outbox
from octavo.engine.shapes import Shapes
from octavo.sampling.params import SamplingParams
from octavo.structured.client import GrammarProcess
from octavo.structured.messages import Close, Open, encode
from octavo.structured.process import GrammarServer, Job
from octavo.structured.spec import StructuredOutputs

MANY = 2000
SPEC = StructuredOutputs(regex="a")
compared = 0


class Counted(int):
    """A number whose comparisons are counted."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        global compared
        compared += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


@pytest.fixture(autouse=True)
def few_comparisons() -> Iterator[None]:
    global compared
    compared = 0
    yield
    assert compared < 10 * MANY


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> GrammarProcess:
    """The engine's side, whose process never begins to serve."""
    monkeypatch.setattr(GrammarProcess, "_start", lambda self: None)
    return GrammarProcess("nowhere", ModelConfig(), StructuredConfig(), vocab_size=32, ends=[2])


def test_the_engine_drops_them_at_once(process: GrammarProcess) -> None:
    shapes, outbox = Shapes(process), Outbox()
    params = SamplingParams(structured_outputs=SPEC)
    tokens = np.array([5], "<i4").tobytes()
    for handle in range(MANY):
        shapes.prepare(
            Submit(handle=Counted(handle), client=0, tokens=tokens, params=params, max_tokens=9, seed=0, eos=(2,))
        )
    shapes.abort(Abort(client=0, handles=tuple(map(Counted, range(1, MANY)))), outbox)
    assert shapes.num_preparing == 1


def test_the_client_of_the_process_forgets_them_at_once(process: GrammarProcess) -> None:
    for number in range(MANY):
        process.open(Counted(number), SPEC, ends=(2,), after=())
    process.forget([Counted(number) for number in range(1, MANY)])
    assert [message.number for message in process._held] == [0]


def test_the_process_forgets_them_at_once() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        server = GrammarServer(theirs, {}, num_tokens=32, timeout=1.0, cache_bytes=100)
        waiting = [Open(number=Counted(number), spec=SPEC, ends=(2,), after=()) for number in range(MANY)]
        server._jobs = {b"a": Job(SPEC, waiting=waiting)}
        server._handle(encode(Close(tuple(range(1, MANY)))))
        assert [message.number for message in server._jobs[b"a"].waiting] == [0]
