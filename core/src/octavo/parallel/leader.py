"""The executor of an engine with several ranks: rank 0's own, and every step goes to the others first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.parallel.communicator import leave
from octavo.parallel.ranks import Ranks
from octavo.parallel.wire import encode_batch, encode_masks
from octavo.plugin.contracts import Communicator, MaskingExecutor, ModelExecutor
from octavo.plugin.step import Batch, KVGroup, Masks, StepResult


class RankedExecutor:
    """Implements `ModelExecutor`.

    comm: rank 0's end of the group, closed with the executor.
    ready: whether the oldest launched step of `executor` is done, so that its `collect` would not wait. With it a wait
    ends when a rank is lost; without it `executor` has to notice that itself.
    """

    def __init__(
        self, executor: ModelExecutor, ranks: Ranks, comm: Communicator, *, ready: Callable[[], bool] | None = None
    ) -> None:
        self._executor, self._ranks, self._comm = executor, ranks, comm
        self._ready = ready

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self._executor.kv_groups

    def launch(self, batch: Batch) -> None:
        """Send, then run. Raises EngineError if a rank is lost, from then on always."""
        self._ranks.send(encode_batch(batch))
        with self._ranks.blamed():
            self._executor.launch(batch)

    def mask(self, masks: Masks) -> None:
        """Send, then sample: every rank chooses tokens itself. Raises as `launch` does."""
        assert isinstance(self._executor, MaskingExecutor)
        self._ranks.send(encode_masks(masks))
        with self._ranks.blamed():
            self._executor.mask(masks)

    def collect(self) -> StepResult:
        """Rank 0's result, which is every rank's. Raises EngineError if a rank is lost."""
        while self._ready is not None and not self._ready():
            self._ranks.check()
            time.sleep(0)  # lets other threads run
        with self._ranks.blamed():
            return self._executor.collect()

    def check(self) -> None:
        """Raise EngineError if a rank is lost."""
        self._ranks.check()

    def close(self) -> None:
        """End all ranks. If one is lost, what this process holds is left to its end: it may wait for that rank."""
        if self._ranks.failed:
            self._ranks.close()
            self._ranks.abandon()
            return
        self._ranks.stop()
        self._executor.close()
        self._comm.close()
        leave()
        self._ranks.close()
