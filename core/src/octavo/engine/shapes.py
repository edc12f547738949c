"""Answers that must have a shape (`SamplingParams.structured_outputs`): who waits for a grammar, who is held by one.

    Submit ──> preparing ──ready──> roster, as any other request
                   └─refused──> Failure
    a step with such a row: launch ─> collect the step before ─> its tokens, masks back ─> MaskingExecutor.mask

A step's masks need the last step's tokens, so they are made while the device already computes the step. What makes
them is behind `Grammars`: no grammar library is known here.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.engine.messages import Abort, Failure, Finish, Submit
from octavo.engine.outbox import Outbox
from octavo.engine.roster import Roster
from octavo.engine.table import RequestTable, Rows
from octavo.errors import EngineError, RequestError
from octavo.plugin.step import Ints, Masks
from octavo.structured.spec import StructuredOutputs

WAIT_S = 0.005
"""How long an engine that has nothing else to do waits for a grammar before it looks for messages again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """An answer's grammar is ready, or has an error; field "": not through the request's fault."""

    number: int
    backend: str = ""
    seconds: float = 0.0
    error: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class Want:
    """Asks for the mask behind an answer's new tokens, and behind each of some drafts."""

    number: int
    tokens: Many[int]
    may_end: bool
    drafts: Many[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """For each position asked for, in order: done, the answer is whole; words: its mask, None if all tokens may come.
    Answers in `errors` cannot go on and have no positions."""

    done: Many[bool]
    words: Many[Ints | None]
    errors: dict[int, str]


class Grammars(Protocol):
    """Compiles grammars and follows answers, each known by a number."""

    def warm(self) -> None:
        """Begin to load what the first answer will need; never waits."""

    def open(self, number: int, spec: StructuredOutputs, *, ends: Many[int], after: Many[int]) -> None:
        """Begin to prepare; never waits. `news` tells the outcome."""

    def news(self, timeout: float) -> list[News]:
        """What was prepared since the last call; waits for at most `timeout` seconds for something."""

    def masks(self, wants: Many[Want]) -> Allowed:
        """Take tokens and make masks; waits for them."""

    def forget(self, numbers: Many[int]) -> None:
        """These answers have ended."""

    def close(self) -> None:
        """Free everything."""


@dataclass(slots=True)
class Shape:
    """One answer. tokens: sampled, and not told to its grammar yet. min_tokens: before which it should not end."""

    number: int
    min_tokens: int
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What grammars say of a step. done: rows whose answers are whole; most: rows that are whole, if drafts come true,
    with that many of the step's tokens; errors: rows that cannot go on, with the reason."""

    masks: Masks
    done: list[int]
    most: dict[int, int]
    errors: dict[int, str]


Key = tuple[int, int]
"""(client, handle)."""


class Shapes:
    """All answers with a shape. False while there is none: a step then does nothing here."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._numbers = 0
        self._preparing: dict[int, Submit] = {}
        self._held: dict[Key, Shape] = {}
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def __bool__(self) -> bool:
        return bool(self._held or self._preparing)

    @property
    def num_preparing(self) -> int:
        return len(self._preparing)

    def warm(self) -> None:
        """Begin to load what the first answer will need."""
        if self._grammars is not None:
            self._grammars.warm()

    def prepare(self, submit: Submit) -> None:
        """Begin with a request's grammar. Raises RequestError where there are none."""
        if self._grammars is None:
            raise RequestError("structured outputs are not served by this engine", field="structured_outputs")
        assert submit.params.structured_outputs is not None
        self._numbers += 1
        self._preparing[self._numbers] = submit
        params = submit.params
        self._grammars.open(
            self._numbers, submit.params.structured_outputs, ends=submit.eos, after=params.structured_after
        )

    def attend(self, roster: Roster, outbox: Outbox, *, idle: bool) -> None:
        """Forget answers that have ended; let those in whose grammar is ready. idle: nothing else is to be done."""
        assert self._grammars is not None
        gone = [key for key in self._held if key not in roster.live]
        if gone:
            self._grammars.forget([self._held.pop(key).number for key in gone])
        if not self._preparing:
            return
        for news in self._grammars.news(WAIT_S if idle else 0.0):
            submit = self._preparing.pop(news.number, None)
            if submit is None:
                continue
            try:
                if news.error:
                    raise RequestError(news.error, field=news.field) if news.field else EngineError(news.error)
                self._enter(roster, submit, news)
            except (RequestError, EngineError) as error:
                outbox.failure(submit.client, failure_of(submit, error))

    def _enter(self, roster: Roster, submit: Submit, news: News) -> None:
        try:
            roster.enter(without_shape(submit))
        except BaseException:
            assert self._grammars is not None
            self._grammars.forget([news.number])
            raise
        roster.live[submit.client, submit.handle].shaped = True
        self._held[submit.client, submit.handle] = Shape(news.number, submit.params.min_tokens)
        self.num_compiled += news.seconds > 0
        self.compile_seconds += news.seconds

    def abort(self, message: Abort, outbox: Outbox) -> None:
        """Drop those that still wait for their grammar."""
        if self._preparing:
            handles, preparing = set(message.handles), self._preparing.items()
            self._drop([n for n, s in preparing if s.client == message.client and s.handle in handles], outbox)

    def abort_all(self, outbox: Outbox) -> None:
        """Drop all that still wait for their grammar."""
        self._drop(list(self._preparing), outbox)

    def _drop(self, numbers: list[int], outbox: Outbox) -> None:
        for number in numbers:
            submit = self._preparing.pop(number)
            outbox.ended(submit.client, submit.handle, Finish.ABORT)
        if numbers and self._grammars is not None:
            self._grammars.forget(numbers)

    def fail_all(self, outbox: Outbox, message: str) -> None:
        """End those that still wait for their grammar as failed."""
        numbers, waiting = list(self._preparing), list(self._preparing.values())
        self._preparing.clear()
        for submit in waiting:
            outbox.ended(submit.client, submit.handle, Finish.ERROR)
            outbox.failure(submit.client, failure_of(submit, EngineError(message)))
        if numbers and self._grammars is not None:
            self._grammars.forget(numbers)

    def note(self, table: RequestTable, rows: Rows, counts: Ints, tokens: Ints) -> None:
        """Remember the new tokens of a step: counts [n] of rows [n], tokens [sum of counts]."""
        if not self._held:
            return
        starts = np.cumsum(counts) - counts
        for place in np.flatnonzero(table.shaped[rows]).tolist():
            shape = self._shape_of(table, int(rows[place]))
            shape.tokens += tokens[starts[place] : starts[place] + counts[place]].tolist()

    def holds(self, table: RequestTable, rows: Rows) -> bool:
        """Whether one of these rows may only sample what its grammar allows."""
        return bool(self._held) and bool(table.shaped[rows].any())

    def _shape_of(self, table: RequestTable, row: int) -> Shape:
        submit = table.sequence(row).submit
        return self._held[submit.client, submit.handle]

    def may_end(self, table: RequestTable, rows: Rows) -> NDArray[np.bool_]:
        """Rows whose answers may end where their grammar allows it, as those without a shape may."""
        free = ~table.shaped[rows]
        for place in np.flatnonzero(~free).tolist():
            row = int(rows[place])
            free[place] = table.known[row] - table.prompt[row] >= self._shape_of(table, row).min_tokens
        return free

    def masks(self, roster: Roster, step: int, rows: Rows, drafts: Ints | None) -> Verdict:
        """The masks of a step whose sampling sequences have these rows and drafts [n, k]."""
        assert self._grammars is not None
        table = roster.table
        places = np.flatnonzero(table.shaped[rows] & table.alive[rows]).tolist()
        lengths = np.zeros(len(rows), np.int32) if drafts is None else (drafts >= 0).sum(axis=1)
        first = (np.cumsum(1 + lengths) - (1 + lengths)).tolist()
        wants = []
        for place in places:
            row = int(rows[place])
            shape = self._shape_of(table, row)
            tokens, shape.tokens = shape.tokens, []
            made = int(table.known[row] - table.prompt[row])
            guesses = [] if drafts is None else drafts[place, : lengths[place]].tolist()
            wants.append(Want(shape.number, tokens, made >= shape.min_tokens, guesses))
        allowed = self._grammars.masks(wants) if wants else Allowed(done=(), words=(), errors={})
        masked: list[int] = []
        words: list[Ints] = []
        done: list[int] = []
        most: dict[int, int] = {}
        errors: dict[int, str] = {}
        position = 0
        for place, want in zip(places, wants, strict=True):
            row = int(rows[place])
            if want.number in allowed.errors:
                errors[row] = allowed.errors[want.number]
                continue
            here = range(position, position + 1 + len(want.drafts))
            position = here.stop
            for offset, (whole, mask) in enumerate(
                zip(allowed.done[here.start : here.stop], allowed.words[here.start : here.stop], strict=True)
            ):
                if whole:
                    if offset:
                        most[row] = offset
                    else:
                        done.append(row)
                    break
                if mask is not None:
                    masked.append(first[place] + offset)
                    words.append(mask)
        masks = Masks(
            step=step,
            places=np.array(masked, np.int32),
            words=np.stack(words) if words else np.empty((0, 1), np.int32),
        )
        return Verdict(masks=masks, done=done, most=most, errors=errors)

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()


def without_shape(submit: Submit) -> Submit:
    """The request as executors get it. They see masks instead of the grammar; and those keep to min_tokens too, as
    long as the grammar has more to say: where it ends, an answer ends, however short it is."""
    params = msgspec.structs.replace(submit.params, structured_outputs=None, structured_after=(), min_tokens=0)
    return msgspec.structs.replace(submit, params=params)


def failure_of(submit: Submit, error: RequestError | EngineError) -> Failure:
    """What the client is told."""
    wrong = isinstance(error, RequestError)
    return Failure(
        handle=submit.handle,
        message=str(error),
        field=error.field if isinstance(error, RequestError) else "",
        client_error=wrong,
    )
