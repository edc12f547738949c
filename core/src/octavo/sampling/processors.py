"""Logits processors of the rows that asked for one. Nothing here is touched by a step without such rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import RequestError
from octavo.plugin.step import Admit

log = logging.getLogger("octavo.sampling")

NEG_INF = float("-inf")


def check_extra_args(
    classes: Mapping[str, type[Any]], extra_args: Mapping[str, Any] | None, *, vocab_size: int
) -> None:
    """Let each named processor look at its argument. Raises RequestError for a name or an argument that is wrong."""
    for name, value in (extra_args or {}).items():
        field = f"extra_args.{name}"
        if name not in classes:
            known = ", ".join(sorted(classes)) or "none is installed"
            raise RequestError(f"{field}: no logits processor has that name; known: {known}", field=field)
        try:
            classes[name].check(value, vocab_size)
        except ValueError as error:
            raise RequestError(f"{field}: {error}", field=field) from error


class ProcessorRows:
    """The processors of all rows. classes: name -> class, see `octavo.plugin.LogitsProcessor`.

    tokens: the device's request table int32 [R, L].
    """

    def __init__(self, classes: Mapping[str, type[Any]], tokens: Tensor) -> None:
        self._classes = classes
        self._tokens = tokens
        self._of_row: dict[int, dict[str, Any]] = {}
        self._broken: dict[int, str] = {}

    @property
    def any(self) -> bool:
        """Whether some row has a processor."""
        return bool(self._of_row or self._broken)

    def admit(self, admit: Admit) -> bool:
        """Make a new row's processors. Returns whether it has some."""
        self.release(admit.row)
        made: dict[str, Any] = {}
        for name, value in (admit.params.extra_args or {}).items():
            try:
                made[name] = self._classes[name](value, admit)
            except Exception as error:
                self._broken[admit.row] = _told(name, error)
                return True
        if made:
            self._of_row[admit.row] = made
        return bool(made)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._of_row.pop(row, None)
        self._broken.pop(row, None)

    def apply(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        upload: Callable[[NDArray[Any]], Tensor],
    ) -> dict[int, str]:
        """Change logits float32 [N, V] of these rows in place; positions [N]: of the tokens to be chosen.

        Returns row -> message for rows that failed; nothing can be chosen for them.
        """
        errors: dict[int, str] = {}
        for name, cls in self._classes.items():
            places = [
                i for i, row in enumerate(rows.tolist()) if name in self._of_row.get(row, ()) and row not in errors
            ]
            if places:
                errors |= self._run(name, cls, logits, rows, positions, np.array(places), upload)
        errors |= {row: self._broken[row] for row in rows.tolist() if row in self._broken}
        failed = [i for i, row in enumerate(rows.tolist()) if row in errors]
        if failed:
            logits[upload(np.array(failed))] = NEG_INF
        return errors

    def _run(
        self,
        name: str,
        cls: type[Any],
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        places: NDArray[np.int64],
        upload: Callable[[NDArray[Any]], Tensor],
    ) -> dict[int, str]:
        """One class for its rows: all in one call; if that fails, one by one, to see whose fault it is."""
        index = upload(places)
        objects = [self._of_row[row][name] for row in rows[places].tolist()]
        lengths = positions[places].tolist()
        known = self._tokens[upload(rows[places].astype(np.int64))][:, : max(lengths)]
        part = logits[index]  # a copy: a call that fails half way has spoilt nothing
        try:
            cls.apply(objects, part, known, lengths)
        except Exception as error:
            if len(places) == 1:
                return {int(rows[places[0]]): _told(name, error)}
            parts = [
                self._run(name, cls, logits, rows, positions, places[i : i + 1], upload) for i in range(len(places))
            ]
            return {row: message for one in parts for row, message in one.items()}
        logits[index] = part
        return {}


def _told(name: str, error: Exception) -> str:
    log.error("the logits processor %r failed", name, exc_info=error)
    return f"the logits processor {name!r} failed: {type(error).__name__}: {error}"
