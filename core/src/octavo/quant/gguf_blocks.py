"""The block formats of GGUF: their schemes, and their numbers in plain PyTorch.

A row of a packed matrix is a run of blocks; a block is one or two float16 scales and the codes of 32 or 256 columns
(layouts: ggml's `ggml-common.h`). The common 4- and 8-bit ones are decoded with torch, on whatever device they are;
the others by the `gguf` package on the CPU, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import gguf
import numpy as np
import torch

from octavo.errors import UnsupportedModelError
from octavo.plugin.quant import Along, MatrixSpec, QuantLayer, QuantTensor
from octavo.plugin.specs import QuantScheme

FAMILY = "gguf"

FORMATS: dict[str, tuple[str, bool]] = {
    "Q4_0": ("int4", True),
    "Q4_1": ("uint4", False),
    "Q5_0": ("int5", True),
    "Q5_1": ("uint5", False),
    "Q8_0": ("int8", True),
    "Q2_K": ("uint2", False),
    "Q3_K": ("int3", True),
    "Q4_K": ("uint4", False),
    "Q5_K": ("uint5", False),
    "Q6_K": ("int6", True),
    "IQ1_S": ("iq1", True),
    "IQ1_M": ("iq1", True),
    "IQ2_XXS": ("iq2", True),
    "IQ2_XS": ("iq2", True),
    "IQ2_S": ("iq2", True),
    "IQ3_XXS": ("iq3", True),
    "IQ3_S": ("iq3", True),
    "IQ4_NL": ("iq4", True),
    "IQ4_XS": ("iq4", True),
    "TQ1_0": ("ternary", True),
    "TQ2_0": ("ternary", True),
    "MXFP4": ("fp4_e2m1", True),
    "NVFP4": ("fp4_e2m1", True),
}
"""Block type -> (number format of a code, symmetric): all types that `gguf` can decode."""

CHUNK_ELEMENTS = 1 << 17
"""Elements decoded at once: the float32 temporaries, half a MiB each, stay in a core's cache."""


def block_size(qtype: str) -> tuple[int, int]:
    """(columns, bytes) of one block."""
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]
    return columns, size


def scheme(qtype: str) -> QuantScheme:
    """The scheme of a matrix packed as `qtype`. Raises UnsupportedModelError for a type without a decoder."""
    if qtype not in FORMATS:
        raise UnsupportedModelError(f"GGUF tensors of type {qtype} cannot be decoded; known: {', '.join(FORMATS)}")
    number, symmetric = FORMATS[qtype]
    return QuantScheme(
        weight=number,
        granularity="group",
        group=(1, block_size(qtype)[0]),
        symmetric=symmetric,
        packing=f"{FAMILY}:{qtype}",
        dequantize=_dequantize,
        int4_groups=_int4_groups if qtype in FOUR_BIT else None,
    )


class GGUFBlocks:
    """Implements `octavo.plugin.QuantFormat` for the block types that a GGUF file's header names."""

    name: ClassVar[str] = FAMILY

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == FAMILY

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config["types"]: checkpoint name of a matrix -> block type; matrices that it lacks are plain."""
        self._types: Mapping[str, str] = config["types"]

    def layer(self, spec: MatrixSpec) -> QuantLayer | None:
        if (qtype := self._types.get(spec.name)) is None:
            return None
        columns, size = block_size(qtype)
        tensor = QuantTensor(
            shape=(spec.out_features, -(-spec.in_features // columns) * size),
            dtype="uint8",
            rows=Along(dim=0),
            columns=Along(dim=1, features=columns, entries=size),
        )
        return QuantLayer(scheme=scheme(qtype), tensors={"weight": tensor})


def qtype_of(scheme: QuantScheme) -> str:
    """The block type of one of our schemes."""
    return scheme.packing.removeprefix(f"{FAMILY}:")


def _dequantize(weights: Mapping[str, torch.Tensor], scheme: QuantScheme, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(weights["weight"], qtype_of(scheme), dtype)


def _int4_groups(weights: Mapping[str, torch.Tensor], scheme: QuantScheme) -> Groups:
    return four_bit(weights["weight"], qtype_of(scheme))


def dequantize(packed: torch.Tensor, qtype: str, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., rows, bytes of a row] -> `dtype` [..., rows, columns], on the same device.

    Values are computed in float32 exactly as the `gguf` package does, then rounded once.
    """
    columns, size = block_size(qtype_of(scheme(qtype)))
    *outer, row_bytes = packed.shape
    assert packed.dtype == torch.uint8, packed.dtype
    assert row_bytes % size == 0, f"rows of {row_bytes} bytes are not whole {qtype} blocks"
    rows = packed.reshape(-1, row_bytes)
    out = torch.empty(len(rows), row_bytes // size * columns, dtype=dtype, device=packed.device)
    step = max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    decode = DECODERS.get(qtype)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        if decode is not None:
            values = decode(chunk.reshape(-1, size))
        else:
            values = _with_gguf(chunk, qtype).to(packed.device)
        out[start : start + step] = values.reshape(len(chunk), -1)
    return out.reshape(*outer, out.shape[1])


def _with_gguf(rows: torch.Tensor, qtype: str) -> torch.Tensor:
    codes = np.ascontiguousarray(rows.cpu().numpy())
    with np.errstate(all="ignore"):  # a scale may be a float16 infinity or NaN: it is passed on, not warned of
        return torch.from_numpy(gguf.dequantize(codes, gguf.GGMLQuantizationType[qtype]))


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 16] -> [..., 32]: low halves are columns 0-15, high halves 16-31; likewise for other widths."""
    return torch.cat([codes & 0x0F, codes >> 4], dim=-1)


Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""codes uint8 [blocks, columns]; scale, offset float32 [blocks, columns / 32]: value = code * scale + offset."""


def _q4_0(blocks: torch.Tensor) -> Groups:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8.0 * scale


def _q4_1(blocks: torch.Tensor) -> Groups:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> Groups:
    """Eight groups: two float16 factors, then 6-bit scales and minima in 12 bytes, the last four's high bits apart."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    minimum = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return codes, _half(blocks, 0) * scale.float(), -(_half(blocks, 2) * minimum.float())


FOUR_BIT: dict[str, Callable[[torch.Tensor], Groups]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
"""Types that are 4-bit codes with a scale and an offset for every 32 columns: uint8 [blocks, bytes] -> `Groups`."""


def four_bit(packed: torch.Tensor, qtype: str) -> Groups:
    """(codes uint8 [rows, columns], scale, offset float32 [rows, columns / 32]) of uint8 [rows, bytes of a row], for
    the types of `FOUR_BIT`: a weight is code * scale + offset, exactly."""
    blocks = packed.reshape(-1, block_size(qtype)[1])
    codes, scale, offset = (t.reshape(len(packed), -1) for t in FOUR_BIT[qtype](blocks))
    return codes, scale, offset


def _from_groups(groups: Callable[[torch.Tensor], Groups], blocks: torch.Tensor) -> torch.Tensor:
    codes, scale, offset = groups(blocks)
    values = codes.view(*scale.shape, -1).float() * scale[..., None] + offset[..., None]
    return values.flatten(1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0,
    **{qtype: partial(_from_groups, groups) for qtype, groups in FOUR_BIT.items()},
}
"""Types decoded with torch: uint8 [blocks, bytes] -> float32 [blocks, columns]."""
