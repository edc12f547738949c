"""The meeting point of a checkpoint and a model: named tensors on one side, named slots on the other.

A layer declares a `Slot` for each checkpoint tensor it needs while it is built (so the model knows, before a byte is
read, every name and shape it expects); a checkpoint reader yields `CheckpointTensor`s, which are lazy. The loader
(`octavo.weights.loader`) compares both sides first and only then copies, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch


class CheckpointTensor(Protocol):
    """One tensor of a checkpoint, not yet read.

    shape, dtype: as it is stored; a matrix of GGUF blocks is uint8 [rows, bytes of a row].
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    """The file it lies in, for messages."""

    def read(self, *, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """The slice [start, start + length) along `dim`, on the CPU. A view of mapped memory where possible: copy
        before changing it. A tensor without dimensions is given whole."""
        ...


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one checkpoint tensor. `load` takes the tensor and keeps what it needs of it (its rank's slice).

    shape: the whole shape expected in the checkpoint. optional: the checkpoint may lack it. Tied weights are one slot,
    whose layer hands the tensor on. dtype: of what random weights are drawn in its place; None: the model's.
    """

    shape: tuple[int, ...]
    load: Callable[[CheckpointTensor], None]
    optional: bool = False
    dtype: torch.dtype | None = None


@dataclass
class WeightTable:
    """All slots of a model by checkpoint (Hugging Face) name, and what to run when everything is loaded."""

    slots: dict[str, Slot] = field(default_factory=dict)
    finishers: list[Callable[[], None]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Regular expressions (full match) of surplus checkpoint names that the model knows and does not need."""

    def add(self, name: str, slot: Slot) -> None:
        assert name not in self.slots, f"two layers want {name}"
        self.slots[name] = slot

    def when_loaded(self, finish: Callable[[], None]) -> None:
        """Call `finish` after the last tensor (packing of weights happens here)."""
        self.finishers.append(finish)
