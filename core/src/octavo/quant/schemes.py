"""From packed tensors to numbers: one decoder per packing, whatever file format it came in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from octavo.errors import UnsupportedModelError
from octavo.plugin.specs import QuantScheme
from octavo.quant import gguf_blocks, online

Decoder = Callable[[Mapping[str, torch.Tensor], QuantScheme, torch.dtype], torch.Tensor]


def _gguf(weights: Mapping[str, torch.Tensor], scheme: QuantScheme, dtype: torch.dtype) -> torch.Tensor:
    return gguf_blocks.dequantize(weights["weight"], scheme.packing.removeprefix("gguf:"), dtype)


DECODERS: dict[str, Decoder] = {"gguf": _gguf, online.FAMILY: online.decode}
"""Packing up to its colon -> decoder. A new format adds one line here and a file beside this one."""


def dequantize_weight(weights: Mapping[str, torch.Tensor], scheme: QuantScheme, dtype: torch.dtype) -> torch.Tensor:
    """The plain weight [N, K] in `dtype`, on the device of the packed tensors.

    weights: the canonical tensors of the scheme by suffix ("weight" and, by format, scales and zero points).
    Raises UnsupportedModelError if no decoder knows the packing.
    """
    family = scheme.packing.partition(":")[0]
    if family not in DECODERS:
        raise UnsupportedModelError(
            f"weights packed as {scheme.packing!r} cannot be decoded; known: {', '.join(sorted(DECODERS))}"
        )
    return DECODERS[family](weights, scheme, dtype)


INT4_PACKINGS = (*(f"gguf:{qtype}" for qtype in gguf_blocks.FOUR_BIT), online.SCHEMES["int4"].packing)
"""Packings that are 4-bit codes with a scale and an offset for every 32 columns."""


def int4_groups(
    weights: Mapping[str, torch.Tensor], scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [N, K] in 0..15, scale, offset float32 [N, K / 32]) of a weight in one of `INT4_PACKINGS`:
    W[n, k] = codes[n, k] * scale[n, k // 32] + offset[n, k // 32], on the device of the packed tensors."""
    if scheme.packing == online.SCHEMES["int4"].packing:
        return online.quantize_groups(weights["weight"])
    return gguf_blocks.four_bit(weights["weight"], scheme.packing.removeprefix("gguf:"))
