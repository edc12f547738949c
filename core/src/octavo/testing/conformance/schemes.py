"""Weights of every quantization scheme that core knows, as a checkpoint holds them: what tier 4 multiplies with.

"gguf:Q4_K" ...   blocks of a GGUF file, for all block types that have a decoder
"online:fp8" ...  plain weights, to be quantized while they are loaded
"""

from __future__ import annotations

from functools import lru_cache

import gguf
import numpy as np
import torch

from octavo.plugin import QuantScheme
from octavo.plugin.torch import dequantize_weight
from octavo.quant import gguf_blocks, online

SCHEMES: dict[str, QuantScheme] = {
    scheme.packing: scheme for scheme in [*map(gguf_blocks.scheme, gguf_blocks.FORMATS), *online.SCHEMES.values()]
}
"""Packing -> scheme."""

NUM_CANDIDATES = 4096
SMALL, LARGE = 1e-3, 16.0
"""Between these lies the largest number of a block worth testing with."""


def quantized_weight(scheme: QuantScheme, rows: int, columns: int, *, seed: int, dtype: str) -> torch.Tensor:
    """The canonical tensor "weight": uint8 [rows, bytes of a row] for GGUF, else [rows, columns] in `dtype`."""
    if online.is_plain(scheme):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, columns, generator=generator).to(getattr(torch, dtype))
    return gguf_rows(gguf_blocks.qtype_of(scheme), rows, columns, seed).clone()


@lru_cache(maxsize=64)
def gguf_rows(qtype: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    """uint8 [rows, bytes of a row]. `gguf` cannot quantize to every type; for those, random blocks serve whose numbers
    are neither huge nor nothing."""
    kind = gguf.GGMLQuantizationType[qtype]
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns), dtype=np.float32)
    try:
        return torch.from_numpy(gguf.quants.quantize(values, kind))
    except NotImplementedError:
        width, size = gguf_blocks.block_size(qtype)
    needed, found = rows * columns // width, torch.empty(0, size, dtype=torch.uint8)
    while len(found) < needed:
        blocks = torch.from_numpy(rng.integers(0, 256, (NUM_CANDIDATES, size), dtype=np.uint8))
        most = gguf_blocks.dequantize(blocks, qtype, torch.float32).abs().amax(1)
        found = torch.cat((found, blocks[(most > SMALL) & (most < LARGE)]))
    return found[:needed].reshape(rows, -1)


def plain_numbers(weight: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """What a quantized weight stands for: float32 [rows, columns]."""
    return dequantize_weight({"weight": weight}, scheme, torch.float32)
