"""The numbers of all running sequences, in arrays indexed by row, so that a step touches no object per sequence.

    tokens   0 ............ prompt ............ known ...... target        limit
             |  the prompt    |  sampled, known    |  in flight |  still allowed |
    KV       0 .............. computed ...................... scheduled
             |  confirmed         |  in flight                   |

A row wants target - scheduled more tokens. `target` runs ahead of `known` by the token that an unfinished step will
sample; it is `known` when nothing is in flight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.engine.sequence import Sequence
from octavo.plugin.step import Ints

Rows = NDArray[np.intp]
"""Row numbers as numpy indexes fastest; batches carry them as int32."""

NEVER = np.iinfo(np.int32).max


class View:
    """What does not change while these rows run, gathered once for many steps. rows, clients, handles ... [n];
    eos [E, n]; first_output: where position 0 of a row would lie in the flat outputs; client: the only one, or -1."""

    def __init__(self, table: RequestTable, rows: Rows) -> None:
        self.rows = rows
        self.rows32 = rows.astype(np.int32)
        self.limit = table.limit[rows]
        self.eos = table.eos[:, rows]
        self.clients = table.client[rows]
        self.handles = table.handle[rows]
        self.cached = table.cached[rows]
        self.first_output = rows * table.outputs.shape[1] - table.prompt[rows]
        self.client = int(self.clients[0]) if len(rows) and (self.clients == self.clients[0]).all() else -1


class RequestTable:
    """num_rows sequences at most. A row is free, running (alive), or ended but still in a step in flight."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.prompt = np.zeros(num_rows, np.int32)
        self.known = np.zeros(num_rows, np.int32)
        self.target = np.zeros(num_rows, np.int32)
        self.limit = np.zeros(num_rows, np.int32)
        self.computed = np.zeros(num_rows, np.int32)
        self.scheduled = np.zeros(num_rows, np.int32)
        self.last_step = np.zeros(num_rows, np.int64)
        self.alive = np.zeros(num_rows, np.bool_)
        self.samples = np.zeros(num_rows, np.bool_)
        self.shaped = np.zeros(num_rows, np.bool_)
        self.draftable = np.zeros(num_rows, np.bool_)
        self.handle = np.zeros(num_rows, np.int64)
        self.client = np.zeros(num_rows, np.int32)
        self.cached = np.zeros(num_rows, np.int32)
        self.eos_from = np.zeros(num_rows, np.int32)
        self.eos = np.full((1, num_rows), -1, np.int32)
        self.outputs = np.zeros((num_rows, 64), np.int32)
        self._most_outputs = 0
        self.ones = np.ones(num_rows, np.int32)
        self.zeros = np.zeros(num_rows, np.int32)
        self.unfinished = np.zeros(num_rows, np.int8)
        self.all = np.ones(num_rows, np.bool_)
        for shared in (self.ones, self.zeros, self.unfinished, self.all):
            shared.setflags(write=False)
        self._view = View(self, np.empty(0, np.intp))
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.released: list[int] = []

    def admit(self, seq: Sequence, *, num_cached: int) -> int:
        """Give a waiting sequence a row; positions below num_cached are already in the cache."""
        row = self.free_rows.pop()
        submit, num_tokens = seq.submit, seq.num_tokens
        seq.row = row
        self.sequences[row] = seq
        self.prompt[row] = len(seq.prompt)
        self.known[row] = self.target[row] = num_tokens
        # A sequence that only computes its prompt never reaches its limit: it ends when nothing is left to compute.
        self.limit[row] = seq.limit if seq.samples else NEVER
        self.computed[row] = self.scheduled[row] = num_cached
        self.last_step[row] = 0
        self.alive[row] = True
        self.samples[row] = seq.samples
        self.shaped[row] = seq.shaped
        # Logits processors are asked once a token, in the order of the answer.
        self.draftable[row] = not submit.params.extra_args
        self.handle[row] = submit.handle
        self.client[row] = submit.client
        self.cached[row] = seq.cached
        self.eos_from[row] = len(seq.prompt) + submit.params.min_tokens
        if len(submit.eos) > len(self.eos):
            extra = np.full((len(submit.eos) - len(self.eos), self.num_rows), -1, np.int32)
            self.eos = np.concatenate((self.eos, extra))
        self.eos[:, row] = -1
        self.eos[: len(submit.eos), row] = submit.eos
        self._widen(len(seq.output))
        self._most_outputs = max(self._most_outputs, len(seq.output))
        self.outputs[row, : len(seq.output)] = seq.output
        return row

    def view(self, rows: Rows) -> View:
        """The constants of these rows. Kept for the array `rows` itself: change a set of rows by making a new array."""
        if rows is not self._view.rows:
            self._view = View(self, rows)
        return self._view

    def make_room(self, width: int) -> None:
        """Be ready for `width` more output tokens in each row."""
        self._most_outputs += width
        if self._most_outputs > self.outputs.shape[1]:
            longest = int((self.known - self.prompt)[self.alive].max(initial=0))
            self._widen(longest + width)
            self._most_outputs = longest + width

    def _widen(self, count: int) -> None:
        width = self.outputs.shape[1]
        if count > width:
            extra = np.zeros((self.num_rows, max(width, count - width)), np.int32)
            self.outputs = np.concatenate((self.outputs, extra), axis=1)
            self._view = View(self, np.empty(0, np.intp))

    def output_of(self, row: int) -> Ints:
        """A copy of the tokens that a row has generated."""
        return self.outputs[row, : self.known[row] - self.prompt[row]].copy()

    def release(self, row: int) -> None:
        """Free a row; workers learn of it with the next batch."""
        seq = self.sequences[row]
        assert seq is not None
        seq.row = -1
        self.sequences[row] = None
        self.alive[row] = False
        self.free_rows.append(row)
        self.released.append(row)

    def sequence(self, row: int) -> Sequence:
        """The sequence of a row in use."""
        seq = self.sequences[row]
        assert seq is not None, f"row {row} is free"
        return seq
