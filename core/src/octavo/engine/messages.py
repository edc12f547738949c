"""What the API side and the engine say to each other. One message per step per client, flat arrays inside.

A request is known by `handle`, an integer chosen by the client and unique within it; `client` is the index of the API
process, so that a delta goes back to who asked. Arrays travel as little-endian bytes (numpy tobytes).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.sampling.params import SamplingParams


class Finish(IntEnum):
    """Why a sequence ended; 0 while it runs. STOP is EOS or a stop token; COMPLETE: its shape leaves nothing to add."""

    RUNNING = 0
    COMPLETE = 6
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Serve this. tokens: int32 prompt ids. max_tokens is resolved: at most what fits the context.

    eos: token ids that end the sequence as STOP (EOS and stop_token_ids), empty with ignore_eos and no stop tokens.
    salt: separates prefix-cache entries (cache_salt, later multimodal hashes).
    leader: handle of the first of a request's answers, sent before; the prompt is computed for it alone. 0: none.
    """

    handle: int
    client: int
    tokens: bytes
    params: SamplingParams
    max_tokens: int
    seed: int
    eos: tuple[int, ...] = ()
    priority: int = 0
    lora: int = 0
    salt: bytes = b""
    leader: int = 0


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop these; a sequence that has already ended is ignored. `finished` True: ended by a stop string."""

    client: int
    handles: tuple[int, ...]
    finished: bool = False


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget all cached blocks that nobody uses."""

    client: int


class Control(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pause, go on, give memory back, or take it again; see `octavo.engine.standstill`. Answered by `Done`.

    mode: what becomes of running requests: "abort" ends them, "wait" lets them end, "keep" (pause only) freezes them.
    level: of sleep. 1 keeps the weights at hand in host memory, 2 does not.
    """

    client: int
    ticket: int
    action: Literal["pause", "resume", "sleep", "wake_up"]
    mode: Literal["abort", "wait", "keep"] = "abort"
    level: int = 1


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the engine after this step."""


Inbound = Submit | Abort | ResetPrefixCache | Control | Shutdown


class LogprobBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of n positions of one sequence; see `octavo.plugin.step.TokenLogprobs`. width = 1 + k."""

    handle: int
    prompt: bool
    start: int
    width: int
    ids: bytes
    values: bytes
    ranks: bytes


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence failed. `client_error` True: the request was wrong (400), else ours (500); `asleep`: it may
    come again later."""

    handle: int
    message: str
    field: str = ""
    client_error: bool = False
    asleep: bool = False


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Engine gauges and counters (counters only grow) after a step.

    spec_drafts: times that a sequence had drafts; spec_draft_tokens: all of them; spec_accepted: those that came true,
    by place.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    free_blocks: int = 0
    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    aborts: int = 0
    sleep_level: int = 0
    paused: bool = False
    grammars: int = 0
    grammar_seconds: float = 0.0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted: tuple[int, ...] = ()


class Deltas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step gave one client. m sequences: handles int64 [m], counts int32 [m], finish int8 [m],
    cached int32 [m] (prompt tokens served by the prefix cache), tokens int32 [sum of counts].

    admitted: (handle, when) of sequences that got their first place in the batch, on the clock `time.monotonic`, which
    the processes of a machine share.
    """

    step: int
    handles: bytes = b""
    counts: bytes = b""
    finish: bytes = b""
    cached: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[LogprobBlock, ...] = ()
    failures: tuple[Failure, ...] = ()
    admitted: tuple[tuple[int, float], ...] = ()
    stats: Stats = Stats()


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine serves. `info`: model facts for the client (see `octavo.engine.client.ModelInfo`), JSON."""

    info: bytes


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine could not start or died. `kind`: the name of the error class in `octavo.errors`."""

    kind: str
    message: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A `Control` has been obeyed, or could not be: `error` says why."""

    ticket: int
    error: str = ""


Outbound = Deltas | Ready | Failed | Done

_encoder = msgspec.msgpack.Encoder()
_inbound = msgspec.msgpack.Decoder(Inbound)
_outbound = msgspec.msgpack.Decoder(Outbound)

encode = _encoder.encode
decode_inbound = _inbound.decode
decode_outbound = _outbound.decode


def int32(data: bytes) -> NDArray[np.int32]:
    """View bytes as an int32 array (read-only)."""
    return np.frombuffer(data, dtype="<i4")


def int64(data: bytes) -> NDArray[np.int64]:
    """View bytes as an int64 array (read-only)."""
    return np.frombuffer(data, dtype="<i8")
