"""Linear layers with plain weights: torch's own product, and Triton's of few tokens where a platform has a cut for it.

With few tokens a product is bound by reading its weight, and a library's kernel leaves most of its tile, and much of
the bandwidth, unused. Which kernel runs depends on the number of tokens alone, never on values.

Triton is imported when it is first used, as torch's own product does without.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from octavo.ops.linear import dense_weight
from octavo.plugin.contracts import Device
from octavo.plugin.data import YES, Support, no
from octavo.plugin.specs import LinearSpec

if TYPE_CHECKING:
    from octavo.triton.overlap import Overlap

Tensor = torch.Tensor

DTYPES = ("bfloat16", "float16", "float32")
FEW_TOKENS_DTYPES = ("bfloat16", "float16")


def refusal(spec: LinearSpec) -> str:
    """Why torch's own product does not give what the spec asks for, on any device; empty if it does."""
    if spec.act_dtype not in DTYPES:
        return f"no {spec.act_dtype} activations"
    if spec.out_dtype != spec.act_dtype:
        return f"gives {spec.act_dtype}, not {spec.out_dtype}"
    if spec.scheme is not None and spec.scheme.act is not None:
        return f"does not quantize activations to {spec.scheme.act}"
    return ""


def few_tokens_refusal(spec: LinearSpec) -> str:
    """`refusal` of a kernel of few tokens with torch's own product behind it."""
    if reason := refusal(spec):
        return reason
    if spec.act_dtype not in FEW_TOKENS_DTYPES:
        return f"multiplies {' and '.join(FEW_TOKENS_DTYPES)}, not {spec.act_dtype}"
    return ""


class TorchLinear:
    """torch's own product. Quantized weights are unpacked when they are loaded. A platform gives it the name of its
    library, and says on which devices it has none (`refusal`)."""

    name: ClassVar[str] = "torch"

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        """Why it does not take the spec; empty if it does."""
        return refusal(spec)

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        reason = cls.refusal(spec, device)
        return no(reason) if reason else YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Tensor:
        """weights: canonical tensors of `spec.scheme`. Raises UnsupportedModelError if core cannot decode them."""
        return dense_weight(weights, spec, device)

    def apply(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, w, bias)


@dataclass(frozen=True, kw_only=True)
class ProductWeight:
    """weight [N, K]. cuts: see `TritonLinear.cuts`. counters: what the programs of a split product meet on, see
    `octavo.triton.gemv.make_counters`. overlap: how kernels start. gate: as in the spec."""

    weight: Tensor
    cuts: tuple[Any, ...]
    counters: Tensor
    overlap: Overlap
    gate: str | None


class TritonLinear:
    """Triton's products of few tokens, and torch's own of more. A platform says what its devices cannot do (`refusal`),
    how many tokens are few (`cuts`) and how kernels start (`overlap_for`)."""

    name: ClassVar[str] = "triton"
    gates: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        """Why it does not take the spec; empty if it does."""
        return few_tokens_refusal(spec)

    @classmethod
    def cuts(cls, spec: LinearSpec, device: Device) -> tuple[Any, ...]:
        """How a product of 0, 1, 2, ... tokens is cut, each a `GemvConfig` or a `SkinnyConfig`; None, and beyond the
        last: torch's own runs."""
        return ()

    @classmethod
    def overlap_for(cls, device: Device) -> Overlap:
        from octavo.triton.overlap import IN_ORDER

        return IN_ORDER

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        reason = cls.refusal(spec, device)
        return no(reason) if reason else YES

    def __init__(self) -> None:
        from octavo.triton import activation, gemv, skinny

        self._products: dict[type[Any], Callable[..., Tensor]] = {
            gemv.GemvConfig: gemv.gemv,
            skinny.SkinnyConfig: skinny.skinny,
        }
        self._act_and_mul = activation.act_and_mul

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> ProductWeight:
        """weights: as for `TorchLinear`."""
        from octavo.triton.gemv import make_counters

        return ProductWeight(
            weight=dense_weight(weights, spec, device),
            cuts=self.cuts(spec, device),
            counters=make_counters(spec.out_features, device.torch_device),
            overlap=self.overlap_for(device),
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
