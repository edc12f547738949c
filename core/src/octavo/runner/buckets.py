"""Shapes of a step: exact, padded to multiples, or padded up to a platform's buckets. Driven by caps alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from octavo.plugin.contracts import BatchKey
from octavo.plugin.data import BucketSpec, PlatformCaps, ScheduleLimits
from octavo.plugin.specs import BatchLimits

RECORDED_AT_START = 512
"""Tokens of a step with prompts in it up to which its shape is recorded before the first request. Larger ones are few,
compute for longer than a launch takes, and each costs start-up time: they are recorded behind their first use."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def up_to(sizes: Sequence[int], value: int) -> int:
    """The least of the ascending `sizes` that is at least `value`. Raises ValueError if all are smaller."""
    index = bisect_left(sizes, value)
    if index == len(sizes):
        raise ValueError(f"{value} exceeds the largest bucket {sizes[-1]}")
    return sizes[index]


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Chooses the padded shape of every step.

    captured: keys that the graph runner prepares, ascending; a step takes the least that holds it, if any does.
    all_at_start: prepare all of them before the first request, as compiling ahead of time needs.
    """

    limits: BatchLimits
    schedule: ScheduleLimits = ScheduleLimits()
    buckets: BucketSpec | None = None
    captured: tuple[BatchKey, ...] = ()
    all_at_start: bool = False

    @classmethod
    def of(cls, caps: PlatformCaps, limits: BatchLimits, captured: Sequence[BatchKey]) -> Shapes:
        """The shapes that the platform's caps ask for."""
        return cls(
            limits=limits,
            schedule=caps.schedule,
            buckets=caps.buckets if caps.shapes == "bucketed" else None,
            captured=tuple(sorted(captured, key=lambda k: (k.num_tokens, k.num_seqs, k.max_context))),
            all_at_start=caps.graph == "aot",
        )

    @property
    def static(self) -> bool:
        """Whether the platform compiles each shape by itself: then work beside the step, too, had better have few."""
        return self.buckets is not None

    @property
    def at_start(self) -> list[BatchKey]:
        """What is recorded before the first request, the largest first: memory that a recording leaves then holds
        every smaller one. Decode steps of every size, and steps of few tokens."""
        return [
            key
            for key in reversed(self.captured)
            if self.all_at_start or key.max_q_len == 1 or key.num_tokens <= RECORDED_AT_START
        ]

    @cached_property
    def _captured_tokens(self) -> list[int]:
        return [key.num_tokens for key in self.captured]

    @property
    def largest(self) -> list[BatchKey]:
        """The largest decode shape and the largest other one, as far as there are any."""
        kinds = ([k for k in self.captured if (k.max_q_len == 1) is decode] for decode in (False, True))
        return [keys[-1] for keys in kinds if keys]

    def choose(self, num_tokens: int, num_seqs: int, max_context: int, max_q_len: int) -> tuple[BatchKey, bool]:
        """(padded shape, whether it is captured) for a step of these sizes."""
        for key in self.captured[bisect_left(self._captured_tokens, num_tokens) :]:
            if (
                key.num_seqs >= num_seqs
                and (key.max_context == 0 or key.max_context >= max_context)
                and (key.max_q_len == 0 or key.max_q_len >= max_q_len)
            ):
                return key, True
        if self.buckets is not None:
            context = up_to(self.buckets.max_context, max_context) if self.buckets.max_context else 0
            return BatchKey(
                num_tokens=up_to(self.buckets.num_tokens, num_tokens),
                num_seqs=up_to(self.buckets.num_seqs, num_seqs),
                max_context=context,
            ), False
        return BatchKey(
            num_tokens=round_up(num_tokens, self.schedule.token_multiple),
            num_seqs=round_up(num_seqs, self.schedule.seq_multiple),
        ), False

    @property
    def max_tokens(self) -> int:
        """The largest padded number of tokens: the size of the input buffers."""
        sizes = [round_up(self.limits.max_num_tokens, self.schedule.token_multiple)]
        sizes += [key.num_tokens for key in self.captured]
        sizes += self.buckets.num_tokens if self.buckets else ()
        return max(sizes)

    @property
    def max_seqs(self) -> int:
        """The largest padded number of sequences."""
        sizes = [round_up(self.limits.max_num_seqs, self.schedule.seq_multiple)]
        sizes += [key.num_seqs for key in self.captured]
        sizes += self.buckets.num_seqs if self.buckets else ()
        return max(sizes)
