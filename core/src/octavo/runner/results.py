"""A launched step, and what it gave in numpy once it is done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.plugin.contracts import Event
from octavo.plugin.step import Batch, Ints, StepResult, TokenLogprobs
from octavo.runner.inputs import Staging
from octavo.sampling.sampler import Sampled
from octavo.speculate.places import Longs, Places

NOTHING = "no token can be chosen: the logits are not finite, or every token is forbidden"


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A launched step: what there is to wait for, and what is all on the host by then.

    places: where in staging.tokens the tokens of what was sampled lie: of each sequence that samples, or with drafts of
    each place of `drafted`.
    """

    batch: Batch
    staging: Staging
    places: NDArray[np.intp]
    drafted: Places | None
    sampled: Sampled
    prompt_logprobs: list[tuple[int, int, Tensor, Tensor, Tensor]]
    done: Event

    def result(self) -> StepResult:
        """What it gave. For a step that is done; its staging memory may be used again afterwards."""
        rows = self.batch.rows[self.batch.samples]
        chosen = self.staging.tokens.numpy()[self.places].astype(np.int32)
        if self.drafted is None:
            tokens, counts = chosen[:, None], np.ones(len(rows), np.int32)
        else:
            tokens, counts = self.drafted.accepted(chosen)
        failed = rows[tokens[np.arange(len(rows)), counts - 1] < 0]
        return StepResult(
            step=self.batch.step,
            rows=rows,
            tokens=tokens,
            counts=counts,
            logprobs=self._logprobs(counts),
            prompt_logprobs=[
                _copied(row, start, *(t.numpy() for t in tensors)) for row, start, *tensors in self.prompt_logprobs
            ],
            errors={row: self.sampled.errors.get(row, NOTHING) for row in failed.tolist()},
        )

    def _logprobs(self, counts: Ints) -> list[TokenLogprobs]:
        """counts: how many tokens of each sequence count."""
        found, batch, drafted = self.sampled.logprobs, self.batch, self.drafted
        if found is None:
            return []
        places, take = found.places, np.ones(len(found.places), np.int32)
        if drafted is None:
            rows, starts = batch.rows[batch.samples], (batch.starts + batch.counts)[batch.samples]
        else:
            rows, starts = drafted.rows, drafted.positions
            take = np.where(drafted.before[places] == 0, counts[drafted.owners[places]], 0)
        ids, values, ranks = found.ids.numpy(), found.values.numpy(), found.ranks.numpy()
        # Each row gets what it asked for, not the most that the step found.
        return [
            _copied(row, start, ids[i : i + n, own], values[i : i + n, own], ranks[i : i + n])
            for i, (row, start, n, own) in enumerate(
                zip(rows[places].tolist(), starts[places].tolist(), take.tolist(), found.columns, strict=True)
            )
            if n
        ]


def _copied(row: int, start: int, ids: Longs, values: NDArray[np.float32], ranks: Longs) -> TokenLogprobs:
    """In memory of its own: a step's memory is used again."""
    return TokenLogprobs(
        row=row,
        start=start,
        ids=ids.astype(np.int32),
        values=values.astype(np.float32),
        ranks=ranks.astype(np.int32),
    )
