"""Bring a checkpoint and a model together: compare first, then copy one tensor at a time in file order."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo.errors import CheckpointError
from octavo.weights.mapped import MappedTensor, forget
from octavo.weights.slots import CheckpointTensor, Slot, WeightTable
from octavo.weights.source import ModelSource

HARMLESS = re.compile(
    r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"  # computed from the config
    r"|.*\.(attn|attention|self_attn)\.(bias|masked_bias)"  # causal masks that old exports saved
    r"|.*\.position_ids"
)
"""Names of tensors that no model needs: they follow from the config."""

MAX_LISTED = 10

HELD_BYTES = 32 << 20
"""As much of the file is in this process's memory beside what the layers made of it: else the whole file would be."""


def load(table: WeightTable, source: ModelSource, *, progress: Callable[[int, int], None] | None = None) -> None:
    """Fill every slot of `table` from `source`, then run the table's finishers.

    progress: called with (tensors done, tensors in all). Raises one CheckpointError that lists what is missing,
    superfluous or of another shape, before anything is read.
    """
    tensors: Sequence[CheckpointTensor]
    tensors = dummy_tensors(table, source.dtype) if source.kind == "dummy" else source.tensors()
    plan = match(table, tensors, path=str(source.path))
    held = 0
    for done, (tensor, slot) in enumerate(plan, start=1):
        slot.load(tensor)
        if isinstance(tensor, MappedTensor) and (held := held + tensor.data.nbytes) >= HELD_BYTES:
            forget(tensor.data)
            held = 0
        if progress is not None:
            progress(done, len(plan))
    for finish in table.finishers:
        finish()


def match(table: WeightTable, tensors: Sequence[CheckpointTensor], *, path: str) -> list[tuple[CheckpointTensor, Slot]]:
    """Which slot each tensor fills, in the order of `tensors`. Raises CheckpointError; see `load`."""
    by_name = {tensor.name: tensor for tensor in tensors}
    filled: dict[str, Slot] = {}
    problems: dict[str, list[str]] = {"missing": [], "of the wrong shape": [], "not known to the model": []}
    for name, slot in table.slots.items():
        if name not in by_name:
            if not slot.optional:
                problems["missing"].append(name)
        elif by_name[name].shape != slot.shape:
            got, want = list(by_name[name].shape), list(slot.shape)
            problems["of the wrong shape"].append(f"{name} is {got}, the config says {want}")
        else:
            filled[name] = slot
    ignored = [re.compile(pattern) for pattern in table.ignored]
    problems["not known to the model"] = [
        name for name, tensor in by_name.items() if name not in table.slots and not _harmless(tensor, ignored)
    ]
    if any(problems.values()):
        parts = [f"{len(names)} tensors {what}: {_some(names)}" for what, names in problems.items() if names]
        raise CheckpointError(
            f"does not fit its config; {'; '.join(parts)}. Check that config and weights belong together", path=path
        )
    return [(tensor, filled[tensor.name]) for tensor in tensors if tensor.name in filled]


def _harmless(tensor: CheckpointTensor, ignored: list[re.Pattern[str]]) -> bool:
    if 0 in tensor.shape or HARMLESS.fullmatch(tensor.name):
        return True
    return any(pattern.fullmatch(tensor.name) for pattern in ignored)


def _some(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


class Noise:
    """Numbers for dummy weights: normal with standard deviation 0.02. Few are drawn, and repeated as often as a weight
    needs: drawing billions would take minutes."""

    PERIOD = 16_777_213
    """After so many numbers they repeat. A prime, so that no two rows of a matrix are equal."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self._drawn = (torch.randn(self.PERIOD, generator=generator) * 0.02).to(dtype)
        self._repeated = self._drawn

    def view(self, first: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size] numbers from place `first` on, not to be written. Whole numbers are the bytes of the floats."""
        count = size if dtype.is_floating_point else -(-size * dtype.itemsize // self._drawn.itemsize)
        if first + count > len(self._repeated):
            self._repeated = self._drawn.repeat(-(-(first + count) // self.PERIOD))
        drawn = self._repeated[first : first + count]
        if dtype.is_floating_point:
            return drawn.to(dtype)
        return drawn.clone().view(torch.uint8)[: size * dtype.itemsize].view(dtype)


@dataclass(kw_only=True)
class DummyTensor:
    """Random weights of a given shape, equal for equal names: measures a model without its checkpoint.

    Vectors of weights are near 1 (they are nearly all norm weights), other floats are normal with the usual standard
    deviation 0.02, so that activations neither vanish nor overflow; whole numbers, which are codes, are any.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    noise: Noise
    source: str = "load_format=dummy"

    def read(self, *, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """A slice of the tensor; slices agree with the whole. Memory of the noise where possible."""
        first = zlib.crc32(self.name.encode()) % Noise.PERIOD
        whole = self.noise.view(first, math.prod(self.shape), self.dtype).view(self.shape)
        if len(self.shape) == 1 and self.name.endswith(".weight"):
            whole = whole + 1.0
        if not self.shape:
            return whole
        length = self.shape[dim] - start if length is None else length
        return whole.narrow(dim, start, length)


def dummy_tensors(table: WeightTable, dtype: torch.dtype) -> list[CheckpointTensor]:
    """One random tensor per slot."""
    noise = Noise(dtype)
    return [
        DummyTensor(name=name, shape=slot.shape, dtype=slot.dtype or dtype, noise=noise)
        for name, slot in table.slots.items()
    ]
