"""What a step has to tell, sorted by client into one `Deltas` each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.messages import Deltas, Failure, Finish, LogprobBlock, Stats
from octavo.plugin.step import Ints


class Progress(NamedTuple):
    """Tokens of n sequences. client: whose all of them are, -1 if several have a share;
    clients, handles, counts, finish, cached [n]; tokens [sum of counts]."""

    client: int
    clients: Ints
    handles: NDArray[np.int64]
    counts: Ints
    finish: NDArray[np.int8]
    cached: Ints
    tokens: Ints


@dataclass(slots=True)
class _Letter:
    """All but tokens that one client gets."""

    ended: list[tuple[int, Finish, int]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    logprobs: list[LogprobBlock] = field(default_factory=list)


_EMPTY = _Letter()


class Outbox:
    """Collects between two publications. One client and nothing but tokens is the fast way."""

    def __init__(self) -> None:
        self._letters: defaultdict[int, _Letter] = defaultdict(_Letter)
        self._progress: list[Progress] = []
        self._admitted: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._letters or self._progress)

    def progress(self, progress: Progress) -> None:
        self._progress.append(progress)

    def ended(self, client: int, handle: int, finish: Finish, *, cached: int = 0) -> None:
        """A sequence ended without a token in this step."""
        self._letters[client].ended.append((handle, finish, cached))

    def failure(self, client: int, failure: Failure) -> None:
        self._letters[client].failures.append(failure)

    def logprobs(self, client: int, block: LogprobBlock) -> None:
        self._letters[client].logprobs.append(block)

    def admitted(self, client: int, handle: int, when: float) -> None:
        """A sequence got its first place in the batch. No news by itself: it goes with the client's next message."""
        self._admitted[client].append((handle, when))

    def publish(self, step: int, stats: Stats) -> dict[int, Deltas]:
        """Client -> its message; the outbox is empty afterwards."""
        parts: dict[int, list[Progress]] = {}
        for progress in self._progress:
            if progress.client >= 0:
                parts.setdefault(progress.client, []).append(progress)
                continue
            for client in np.unique(progress.clients).tolist():
                parts.setdefault(client, []).append(_only(progress, client))
        self._progress = []
        letters: dict[int, _Letter] = {}
        if self._letters:
            letters, self._letters = self._letters, defaultdict(_Letter)
        for client, letter in letters.items():
            mine = parts.setdefault(client, [])
            if letter.ended:
                mine.append(_without_tokens(client, letter.ended))
        take = self._admitted.pop
        return {
            client: _deltas(step, stats, mine, letters.get(client, _EMPTY), take(client, ()))
            for client, mine in parts.items()
        }


def _only(progress: Progress, client: int) -> Progress:
    mine = progress.clients == client
    return Progress(
        client=client,
        clients=progress.clients[mine],
        handles=progress.handles[mine],
        counts=progress.counts[mine],
        finish=progress.finish[mine],
        cached=progress.cached[mine],
        tokens=progress.tokens[np.repeat(mine, progress.counts)],
    )


def _without_tokens(client: int, ended: list[tuple[int, Finish, int]]) -> Progress:
    return Progress(
        client=client,
        clients=np.full(len(ended), client, np.int32),
        handles=np.array([handle for handle, _, _ in ended], np.int64),
        counts=np.zeros(len(ended), np.int32),
        finish=np.array([finish for _, finish, _ in ended], np.int8),
        cached=np.array([cached for _, _, cached in ended], np.int32),
        tokens=np.empty(0, np.int32),
    )


def _deltas(
    step: int, stats: Stats, parts: list[Progress], letter: _Letter, admitted: Iterable[tuple[int, float]]
) -> Deltas:
    whole = _join(parts)
    return Deltas(
        step=step,
        handles=whole.handles.tobytes(),
        counts=whole.counts.tobytes(),
        finish=whole.finish.tobytes(),
        cached=whole.cached.tobytes(),
        tokens=whole.tokens.tobytes(),
        logprobs=tuple(letter.logprobs),
        failures=tuple(letter.failures),
        admitted=tuple(admitted),
        stats=stats,
    )


def _join(parts: list[Progress]) -> Progress:
    if len(parts) == 1:
        return parts[0]
    parts = parts or [_without_tokens(0, [])]
    client, *_ = parts[0]
    return Progress(client, *(np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[1:]))
