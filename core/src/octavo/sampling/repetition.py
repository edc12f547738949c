"""Ends an answer that has begun to repeat itself: the parameters, and a watch over one growing answer. No torch.

A pattern of p tokens has come c times in a row when each of the last p * (c - 1) tokens equals the one p places before
it. So it is enough to count, for every p, for how many tokens in a row that has been true: work per token is one
comparison of the newest token with the `max_pattern_size` tokens before it, however long the answer is.
"""

from __future__ import annotations

import msgspec
import numpy as np

from octavo.errors import RequestError
from octavo.plugin.step import Ints

MAX_PATTERN = 4096


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """When an answer counts as repeating itself. Raises RequestError when made of values out of range.

    Its last tokens are `min_count` (at least 2) copies of one pattern of `min_pattern_size` to `max_pattern_size`
    tokens. The answer then ends with finish_reason "repetition". 0 for max_pattern_size turns it off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value, field = getattr(self, name), f"repetition_detection.{name}"
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{field} must be an integer, not {value!r}", field=field)
            if not 0 <= value <= MAX_PATTERN:
                raise RequestError(f"{field} must be in [0, {MAX_PATTERN}], not {value}", field=field)
        if not self.on:
            return
        if self.min_count < 2:
            field = "repetition_detection.min_count"
            raise RequestError(f"{field} must be at least 2, not {self.min_count}", field=field)
        if self.min_pattern_size > self.max_pattern_size:
            field = "repetition_detection.min_pattern_size"
            raise RequestError(
                f"{field} ({self.min_pattern_size}) must not exceed max_pattern_size ({self.max_pattern_size})",
                field=field,
            )

    @property
    def on(self) -> bool:
        return self.max_pattern_size > 0


class RepetitionWatch:
    """Follows one answer. Its state is a function of the tokens alone, so preemption does not disturb it."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = np.arange(max(1, params.min_pattern_size), params.max_pattern_size + 1)
        self._first, self._last = int(sizes[0]), int(sizes[-1])
        self._needed = sizes * (params.min_count - 1)
        self._runs = np.zeros(len(sizes), np.int64)  # tokens in a row that equal the one `size` places before
        self._num_seen = 0

    def find(self, output: Ints, *, from_length: int = 0) -> int | None:
        """Length of the answer at which it first repeats itself; None if it does not.

        output: the whole answer so far; what an earlier call has seen is not looked at again.
        from_length: shorter answers do not count.
        """
        for at in range(self._num_seen, len(output)):
            self._num_seen = at + 1
            # The token `size` places back, for each size; sizes that reach back before the answer have no run.
            reach = min(self._last, at) - self._first + 1
            if reach <= 0:
                continue
            before = output[at - self._first - reach + 1 : at - self._first + 1][::-1]
            self._runs[:reach] = np.where(before == output[at], self._runs[:reach] + 1, 0)
            if at + 1 >= from_length and (self._runs >= self._needed).any():
                return at + 1
        return None
