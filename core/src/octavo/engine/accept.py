"""Take a step's sampled tokens into the table: where each row's answer stops, and why."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.messages import Finish
from octavo.engine.table import RequestTable, Rows
from octavo.plugin.step import Ints


@dataclass(slots=True)
class Accepted:
    """counts [n]: tokens taken of each row; skipped [n]: leading ones that were already known;
    finish [n]: a `Finish`; tokens [sum of counts]; any_ended: whether some finish is not RUNNING."""

    counts: Ints
    skipped: Ints
    finish: NDArray[np.int8]
    tokens: Ints
    any_ended: bool


def accept(table: RequestTable, rows: Rows, first: Ints, tokens: Ints, counts: Ints) -> Accepted:
    """Append sampled tokens [n, w] (the leading `counts` of each row are valid) to their rows.

    first [n]: positions of the first tokens. Those that are known already (the step was scheduled before an
    earlier step gave several tokens) are skipped; those behind a stop token or the limit are cut off.
    """
    known = table.known[rows]
    if tokens.shape[1] == 1 and first.tobytes() == known.tobytes():
        return _accept_one(table, rows, tokens, known)
    column = np.arange(tokens.shape[1], dtype=np.int32)
    at = first[:, None] + column
    new = (column < counts[:, None]) & (at >= known[:, None])
    stops = (tokens == table.eos[:, rows][:, :, None]).any(axis=0)
    stops &= (at >= table.eos_from[rows][:, None]) & new
    last = stops | (new & (at + 1 >= table.limit[rows][:, None]))
    ended = last.any(axis=1)
    cut = last.argmax(axis=1)
    keep = new & (~ended[:, None] | (column <= cut[:, None]))
    taken = keep.sum(axis=1, dtype=np.int32)
    flat = tokens[keep].astype(np.int32, copy=False)
    table.make_room(tokens.shape[1])
    table.outputs.reshape(-1)[np.repeat(table.view(rows).first_output, taken) + at[keep]] = flat
    after = known + taken
    table.known[rows] = after
    table.target[rows] = np.maximum(table.target[rows], after)
    finish = np.zeros(len(rows), np.int8)
    finish[ended] = Finish.LENGTH
    finish[ended & stops[np.arange(len(rows)), cut]] = Finish.STOP
    return Accepted(taken, np.maximum(known - first, 0), finish, flat, bool(ended.any()))


def _accept_one(table: RequestTable, rows: Rows, tokens: Ints, known: Ints) -> Accepted:
    """One new token each: the common case, without the masks of the general one.

    `target` is not touched: it became known + 1 when this step was scheduled.
    """
    num = len(rows)
    flat = np.ascontiguousarray(tokens[:, 0], np.int32)
    table.make_room(1)
    view = table.view(rows)
    table.outputs.reshape(-1)[view.first_output + known] = flat
    after = known + 1
    table.known[rows] = after
    full = after >= view.limit
    stops = view.eos == flat
    finish, any_ended = table.unfinished[:num], False
    if np.count_nonzero(full) or np.count_nonzero(stops):
        finish = np.zeros(num, np.int8)
        finish[full] = Finish.LENGTH
        finish[stops.any(axis=0) & (known >= table.eos_from[rows])] = Finish.STOP
        any_ended = bool(finish.any())
    return Accepted(table.ones[:num], table.zeros[:num], finish, flat, any_ended)


def end_repetitions(table: RequestTable, watched: Collection[int], rows: Rows, accepted: Accepted) -> Accepted:
    """Also end the answers of `watched` rows that have begun to repeat themselves, at the token at which they do.

    An answer that stops by itself at that token ends as it would have. The device does not know of such an end: like
    any that the host alone sees, it shows a step late.
    """
    finish, counts = accepted.finish.copy(), accepted.counts.copy()
    keep = np.ones(len(accepted.tokens), np.bool_)
    ends = np.cumsum(counts)
    for at, row in enumerate(rows.tolist()):
        if row not in watched:
            continue
        seq, num_output = table.sequence(row), int(table.known[row] - table.prompt[row])
        assert seq.repetition is not None, f"row {row} is watched for nothing"
        output = table.outputs[row, :num_output]
        length = seq.repetition.find(output, from_length=seq.submit.params.min_tokens)
        if length is None or (length == num_output and finish[at]):
            continue
        surplus = num_output - length
        finish[at] = Finish.REPETITION
        counts[at] -= surplus
        keep[ends[at] - surplus : ends[at]] = False
        table.known[row] -= surplus
    return Accepted(counts, accepted.skipped, finish, accepted.tokens[keep], bool(finish.any()))
