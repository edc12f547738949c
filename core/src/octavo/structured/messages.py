"""What the engine and its grammar process say to each other. Answers are known by a number that the engine chooses."""

from __future__ import annotations

import msgspec

from octavo.structured.spec import StructuredOutputs


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message. vocab_size: of the logits; ends: ids that end answers; timeout: seconds a grammar may take
    to compile; cache_bytes: compiled grammars that are kept."""

    tokenizer: str
    revision: str | None
    trust_remote_code: bool
    vocab_size: int
    ends: tuple[int, ...]
    timeout: float
    cache_bytes: int


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compile the spec and be ready to follow an answer. tokens: what it holds already."""

    number: int
    spec: StructuredOutputs
    ends: tuple[int, ...]
    after: tuple[int, ...]


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """tokens: new in an answer. may_end: whether an end is allowed where it could also go on. drafts: tokens that may
    follow, each of which wants a mask behind it."""

    number: int
    tokens: tuple[int, ...]
    may_end: bool = True
    drafts: tuple[int, ...] = ()


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Take tokens and make masks."""

    asks: tuple[Ask, ...]


class Close(msgspec.Struct, frozen=True, tag=True):
    """Forget these answers."""

    numbers: tuple[int, ...]


class Started(msgspec.Struct, frozen=True, tag=True):
    """The process serves."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An answer can begin. seconds: what compiling took, 0 if the grammar was known."""

    number: int
    backend: str
    seconds: float = 0.0


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A spec cannot be compiled. field "": through no fault of the request."""

    number: int
    message: str
    field: str


class Filled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The masks of a Fill, in order: one `State` for each position, and int32 words for those that are MASKED.

    errors: answers that cannot go on; they have no states.
    """

    states: bytes
    words: bytes
    errors: dict[int, str]


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The process cannot serve, and ends."""

    message: str


ToProcess = Hello | Open | Fill | Close
FromProcess = Started | Ready | Refused | Filled | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_process = msgspec.msgpack.Decoder(ToProcess).decode
decode_from_process = msgspec.msgpack.Decoder(FromProcess).decode
