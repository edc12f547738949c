"""Matrix multiplications: cuBLAS, and Triton's products of few tokens where they were measured to be faster.

With up to a hundred tokens or so a product is bound by reading its weight, and cuBLAS leaves up to a third of the
bandwidth unused for narrow weights; with more it is near the card's limits. Which kernel runs depends on the number of
tokens alone, never on values.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    assert weight.shape == (spec.out_features, spec.in_features), f"{tuple(weight.shape)} for {spec}"
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


def few_tokens_refusal(spec: LinearSpec, device: Device) -> str:
    """Why no kernel of few tokens takes the spec; empty if they do."""
    if reason := refusal(spec, device):
        return reason
    if spec.act_dtype not in GEMV_DTYPES:
        return f"multiplies {' and '.join(GEMV_DTYPES)}, not {spec.act_dtype}"
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


Key = tuple[int, int, bool, int]
"""(N, K, whether gated, T): a product whose time was measured."""


@dataclass(frozen=True, kw_only=True)
class ProductWeight:
    """weight [N, K]. cuts: how Triton runs it with 0, 1, 2, ... tokens; None and beyond the last: cuBLAS is faster.

    counters: what the programs of a split product meet on, see `octavo.triton.gemv.make_counters`. overlap: how the
    card starts a kernel before the one before it has ended, an `octavo.triton.overlap.Overlap`.
    """

    weight: Tensor
    cuts: tuple[Any, ...]
    counters: Tensor
    overlap: Any
    gate: str | None


class TritonLinear:
    """Triton's products of few tokens, and cuBLAS for more.

    table: the cut of each product that was measured, a `GemvConfig` or `SkinnyConfig`; None where cuBLAS won.
    """

    name: ClassVar[str] = "triton"
    gates: ClassVar[tuple[str, ...]] = ("silu", "gelu", "gelu_tanh")
    table: ClassVar[Mapping[Key, Any]] = {}

    @classmethod
    def with_table(cls, table: Mapping[Key, Any]) -> type[TritonLinear]:
        """This kernel with a card's measurements."""
        return type(cls.__name__, (cls,), {"table": table, "__module__": cls.__module__, "__doc__": cls.__doc__})

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := few_tokens_refusal(spec, device):
            return no(reason)
        if not any(cls.cuts(spec)):
            gated = "gated " if spec.gate else ""
            return no(f"not measured to be faster for {gated}{spec.out_features}x{spec.in_features} on this card")
        return YES

    @classmethod
    def cuts(cls, spec: LinearSpec) -> tuple[Any, ...]:
        """The cut for 0, 1, 2, ... tokens, up to the most that were measured; between two measurements the larger's."""
        shape = (spec.out_features, spec.in_features, spec.gate is not None)
        measured = {key[3]: cut for key, cut in cls.table.items() if key[:3] == shape}
        cuts: list[Any] = [None]
        for tokens in range(1, max(measured, default=0) + 1):
            # A cut for one token may do without the matrix unit, which several need.
            fits = [t for t in sorted(measured) if t >= tokens and (tokens == 1 or getattr(measured[t], "dot", True))]
            cuts.append(measured[fits[0]] if fits else None)
        return tuple(cuts)

    def __init__(self) -> None:
        from octavo.triton import activation, gemv, skinny

        self._products: dict[type[Any], Callable[..., Tensor]] = {
            gemv.GemvConfig: gemv.gemv,
            skinny.SkinnyConfig: skinny.skinny,
        }
        self._act_and_mul = activation.act_and_mul

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> ProductWeight:
        """weights: as for cuBLAS."""
        from octavo.triton.gemv import make_counters
        from octavo_cuda.overlap import overlap_for

        return ProductWeight(
            weight=plain_weight(weights, spec, device),
            cuts=self.cuts(spec),
            counters=make_counters(spec.out_features, device.torch_device),
            overlap=overlap_for(getattr(device, "capability", (0, 0))),
            gate=spec.gate,
        )

    def apply(self, x: Tensor, w: ProductWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] behind a gate."""
        num_tokens = x.shape[0]
        if num_tokens < len(w.cuts) and (cut := w.cuts[num_tokens]) is not None:
            product = self._products[type(cut)]
            return product(x, w.weight, bias, gate=w.gate, config=cut, counters=w.counters, overlap=w.overlap)
        y = F.linear(x, w.weight, bias)
        return y if w.gate is None else self._act_and_mul(y, w.gate, overlap=w.overlap)
