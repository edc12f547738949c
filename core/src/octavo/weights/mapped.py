"""A tensor that lies in a mapped file: what every checkpoint reader of ours yields.

Nothing is read until `read`; the mapping lives as long as some tensor (or a view that `read` gave) does.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from octavo.errors import CheckpointError

MAP_NORESERVE = 0x4000
"""Linux: claim no memory for copies of pages that nobody will write; else a file beyond RAM could not be mapped.
(The mmap module names it from Python 3.13 on.)"""


def map_file(path: Path) -> np.ndarray:
    """The file as uint8 [bytes], mapped. Private pages: whoever writes into a view changes no file.

    Raises CheckpointError if the file cannot be opened or is empty.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError("the file is empty; download it again", path=str(path))
            if sys.platform != "linux":
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
            pages = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
            return np.frombuffer(pages, dtype=np.uint8)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=str(path)) from error


def forget(data: np.ndarray) -> None:
    """Let go of the pages that were read of the whole file that `data` is part of. They stay in the system's page
    cache; a view that is still in use reads them from there again, and loses what was written into it."""
    while isinstance(data.base, np.ndarray):
        data = data.base
    pages = data.base.obj if isinstance(data.base, memoryview) else data.base
    if isinstance(pages, mmap.mmap) and sys.platform == "linux":
        pages.madvise(mmap.MADV_DONTNEED)


@dataclass(kw_only=True, eq=False)
class MappedTensor:
    """A `CheckpointTensor` over the bytes of a mapped file.

    data: uint8, all bytes of the tensor. dtype: of its elements in the file. position: of the first byte in the file.
    row_order: int64 [shape[0]]; logical row i is stored row row_order[i]. offset: is added to every element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    data: np.ndarray
    position: int
    row_order: torch.Tensor | None = None
    offset: float = 0.0

    def read(self, *, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """The slice [start, start + length) along `dim`; see `CheckpointTensor.read`."""
        tensor = self._whole()
        if not self.shape:
            return tensor
        dim %= len(self.shape)
        length = self.shape[dim] - start if length is None else length
        assert 0 <= start <= start + length <= self.shape[dim], f"{self.name} {self.shape} [{start}:{start + length}]"
        if dim == 0 and self.row_order is not None:
            tensor = tensor[self.row_order[start : start + length]]
        else:
            tensor = tensor.narrow(dim, start, length)
            tensor = tensor if self.row_order is None else tensor[self.row_order]
        return tensor if self.offset == 0.0 else (tensor.float() + self.offset).to(self.dtype)

    def _whole(self) -> torch.Tensor:
        data = self.data
        if data.size and data.ctypes.data % self.dtype.itemsize:
            data = data.copy()  # torch may assume aligned elements; only odd files need this
        return torch.from_numpy(data).view(self.dtype).reshape(self.shape)
