"""Matrix multiplications: cuBLAS, and Triton's GEMV where it was measured to be faster.

With a handful of tokens a product is bound by reading its weight, and cuBLAS leaves up to a third of the bandwidth
unused for narrow weights; with more it is near the card's limits. Which kernel runs depends on the number of tokens
alone, never on values.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import dequantize_weight

Tensor = torch.Tensor

DTYPES = ("bfloat16", "float16", "float32")
GEMV_DTYPES = ("bfloat16", "float16")


def plain_weight(weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Tensor:
    """The weight [N, K] in the activations' dtype, unpacked if it is quantized, contiguous on the device."""
    dtype = getattr(torch, spec.act_dtype)
    if spec.scheme is None:
        weight = weights["weight"].to(dtype)
    else:
        weight = dequantize_weight(weights, spec.scheme, dtype)
    assert weight.shape == (spec.out_features, spec.in_features), f"{spec.name}: {tuple(weight.shape)}"
    return weight.to(device.torch_device).contiguous()


def refusal(spec: LinearSpec, device: Device) -> str:
    """Why no kernel of this file takes the spec; empty if they do."""
    if device.type != "cuda":
        return f"needs a cuda device, not {device.type}"
    if spec.act_dtype not in DTYPES:
        return f"no {spec.act_dtype} activations"
    if spec.out_dtype != spec.act_dtype:
        return f"gives {spec.act_dtype}, not {spec.out_dtype}"
    if spec.scheme is not None and spec.scheme.act is not None:
        return f"does not quantize activations to {spec.scheme.act}"
    return ""


class CublasLinear:
    """torch's own product. Quantized weights are unpacked when they are loaded."""

    name: ClassVar[str] = "cublas"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        reason = refusal(spec, device)
        return no(reason) if reason else YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Tensor:
        """weights: canonical tensors of `spec.scheme`. Raises UnsupportedModelError if core cannot decode them."""
        return plain_weight(weights, spec, device)

    def apply(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, w, bias)


@dataclass(frozen=True, kw_only=True)
class GemvWeight:
    """weight [N, K]. cuts: how GEMV runs with 0, 1, 2, ... tokens; None, and more than are listed: cuBLAS is faster.

    counters: what the programs of a split product meet on, see `octavo.triton.gemv.make_counters`.
    """

    weight: Tensor
    cuts: tuple[Any, ...]
    counters: Tensor


class GemvLinear:
    """cuBLAS with Triton's GEMV for few tokens. `table`: (N, K, T) -> GemvConfig of the products that GEMV wins."""

    name: ClassVar[str] = "gemv"
    table: ClassVar[Mapping[tuple[int, int, int], Any]] = {}

    @classmethod
    def with_table(cls, table: Mapping[tuple[int, int, int], Any]) -> type[GemvLinear]:
        """This kernel with a card's measurements."""
        return type(cls.__name__, (cls,), {"table": table, "__module__": cls.__module__, "__doc__": cls.__doc__})

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(spec, device):
            return no(reason)
        if spec.act_dtype not in GEMV_DTYPES:
            return no(f"multiplies {' and '.join(GEMV_DTYPES)}, not {spec.act_dtype}")
        if not any(cls.cuts(spec.out_features, spec.in_features)):
            return no(f"not measured to be faster for {spec.out_features}x{spec.in_features} on this card")
        return YES

    @classmethod
    def cuts(cls, num_out: int, num_in: int) -> tuple[Any, ...]:
        """The cut for 0, 1, 2, ... tokens, up to the most that were measured; between two measurements the larger's."""
        measured = {rows: config for (n, k, rows), config in cls.table.items() if (n, k) == (num_out, num_in)}
        cuts: list[Any] = [None]
        for rows in range(1, max(measured, default=0) + 1):
            # A cut for one row may do without the matrix unit, which several rows need.
            fits = [r for r in sorted(measured) if r >= rows and (rows == 1 or measured[r].dot)]
            cuts.append(measured[fits[0]] if fits else None)
        return tuple(cuts)

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> GemvWeight:
        """weights: as for cuBLAS."""
        from octavo.triton.gemv import make_counters

        return GemvWeight(
            weight=plain_weight(weights, spec, device),
            cuts=self.cuts(spec.out_features, spec.in_features),
            counters=make_counters(spec.out_features, device.torch_device),
        )

    def __init__(self) -> None:
        from octavo.triton.gemv import gemv

        self._gemv = gemv

    def apply(self, x: Tensor, w: GemvWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        num_tokens = x.shape[0]
        if num_tokens < len(w.cuts) and (cut := w.cuts[num_tokens]) is not None:
            return self._gemv(x, w.weight, bias, config=cut, counters=w.counters)
        return F.linear(x, w.weight, bias)
