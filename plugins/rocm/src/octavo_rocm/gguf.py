"""GGUF's Q8_0, Q4_0 and Q4_K as they lie in the file: no byte more to keep or to read.

    up to 4 tokens   the HIP kernel decodes in registers
    more             unpacked into a temporary by the same kernels, then hipBLASLt

The 4-bit ones are served by `int4` by default, which has a kernel of its own for up to 256 tokens, at 5 bits a weight
instead of 4.5: `--kernel linear=gguf` takes these, in a file that has no other types.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo_rocm import products, torch_ops
from octavo_rocm.linear import few_tokens_refusal

Tensor = torch.Tensor

FAMILY = "gguf:"


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """rows uint8 [N, bytes of a row], in blocks of `qtype`. dtype: of activations, and of what is unpacked."""

    rows: Tensor
    qtype: str
    num_in: int
    dtype: torch.dtype

    def unpacked(self, rows: Tensor) -> Tensor:
        """Some of the rows, or all: [n, bytes of a row] -> [n, K], each number rounded once."""
        return torch_ops.unpack(rows, None, self.num_in, self.qtype, self.dtype)


class GgufLinear:
    """Weights that stay in the file's own blocks."""

    name: ClassVar[str] = "gguf"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        packing = spec.scheme.packing if spec.scheme else ""
        qtype = packing.removeprefix(FAMILY)
        if not packing.startswith(FAMILY) or qtype not in products.BLOCKS:
            return no(f"reads {', '.join(products.BLOCKS)} of GGUF, not {packing or 'plain weights'}")
        if reason := few_tokens_refusal(spec, device):
            return no(reason)
        reason = products.objection(device, qtype, spec.act_dtype)
        return no(reason) if reason else YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> PackedRows:
        """weights: "weight" uint8 [N, bytes of a row]."""
        assert spec.scheme is not None
        rows = weights["weight"].to(device.torch_device).contiguous()
        qtype, dtype = spec.scheme.packing.removeprefix(FAMILY), getattr(torch, spec.act_dtype)
        return PackedRows(rows=rows, qtype=qtype, num_in=spec.in_features, dtype=dtype)

    def apply(self, x: Tensor, w: PackedRows, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        if products.takes(x):
            return torch_ops.gemv(x, w.rows, None, bias, w.qtype)
        return F.linear(x, w.unpacked(w.rows), bias)

    def look_up(self, w: PackedRows, ids: Tensor, first: int, scale: float | None) -> Tensor:
        """Rows of the weight, see `LinearKernel`."""
        at = ids - first
        elsewhere = (at < 0) | (at >= w.rows.shape[0])
        found = w.unpacked(w.rows.index_select(0, at.masked_fill(elsewhere, 0)))
        if scale is not None:
            found = found * scale
        return found.masked_fill(elsewhere[:, None], 0.0)
