"""A build context over the reference kernels, and checkpoint tensors that lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.layers.context import BuildContext
from octavo.ops.bind import KernelTable
from octavo.parallel.communicator import SingleRank
from octavo.plugin.specs import BatchLimits
from octavo.plugin.torch import TorchDevice
from octavo.quant.gguf_blocks import GGUFBlocks

EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class MemoryTensor:
    """A `CheckpointTensor` over `data`. kind: the GGUF type of a packed one."""

    name: str
    data: torch.Tensor
    kind: str = ""
    source: str = "memory"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def read(self, *, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        if not self.shape:
            return self.data
        return self.data.narrow(dim, start, self.data.shape[dim] - start if length is None else length)


def plain(name: str, data: torch.Tensor) -> MemoryTensor:
    return MemoryTensor(name=name, data=data)


def packed(name: str, data: torch.Tensor, kind: str) -> MemoryTensor:
    """`data` [N, K] quantized as GGUF does, K a multiple of 32."""
    rows = gguf.quants.quantize(data.numpy().astype(np.float32), gguf.GGMLQuantizationType[kind])
    return MemoryTensor(name=name, data=torch.from_numpy(rows), kind=kind)


def unpacked(tensor: MemoryTensor) -> torch.Tensor:
    """What a packed tensor stands for, as the gguf package says."""
    return torch.from_numpy(gguf.quants.dequantize(tensor.data.numpy(), gguf.GGMLQuantizationType[tensor.kind]))


@pytest.fixture
def make_context() -> Callable[..., BuildContext]:
    """(gguf, **fields) -> a context on the CPU in float32, with reference kernels and one rank, for a checkpoint whose
    matrices have these GGUF types by name; the others are plain."""

    def make(gguf: Mapping[str, str] = EMPTY, **fields: Any) -> BuildContext:
        settings: dict[str, Any] = {
            "device": TorchDevice("cpu"),
            "dtype": torch.float32,
            "kv_dtype": "float32",
            "block_size": 16,
            "limits": BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=128),
            "kernels": KernelTable(),
            "comm": SingleRank(),
            "quant": GGUFBlocks({"types": gguf}).layer,
        }
        return BuildContext(**(settings | fields))

    return make


@pytest.fixture
def tensors() -> Any:
    """The makers of checkpoint tensors: `plain`, `packed`, and `unpacked` to see through the latter."""

    class Makers:
        plain = staticmethod(plain)
        packed = staticmethod(packed)
        unpacked = staticmethod(unpacked)

    return Makers
