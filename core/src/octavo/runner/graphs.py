"""The default `GraphRunner`: nothing is captured, every step runs as it is called."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.plugin.contracts import BatchKey, Handle, Step
from octavo.plugin.specs import BatchLimits


class EagerRunner:
    """Captures nothing: `keys` is empty, so core never prepares a step."""

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        return ()

    def prepare(self, key: BatchKey, fn: Step) -> Handle:
        return fn

    def run(self, handle: Handle) -> object:
        return handle()

    def close(self) -> None:
        """Nothing is held."""
