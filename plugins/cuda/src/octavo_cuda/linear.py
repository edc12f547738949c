"""Core's linear layers with plain weights: cuBLAS, and Triton's products of few tokens where they were measured to be
faster.

cuBLAS leaves up to a third of the bandwidth unused for narrow weights and a hundred tokens or so; with more it is near
the card's limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.plugin import Device, LinearSpec
from octavo.triton import linear_plain

if TYPE_CHECKING:
    from octavo.triton.overlap import Overlap


def device_refusal(device: Device) -> str:
    """Why no kernel of this plugin runs on the device; empty if they may."""
    return "" if device.type == "cuda" else f"needs a cuda device, not {device.type}"


def few_tokens_refusal(spec: LinearSpec, device: Device) -> str:
    """Why no kernel of few tokens takes the spec; empty if they do."""
    return device_refusal(device) or linear_plain.few_tokens_refusal(spec)


class CublasLinear(linear_plain.TorchLinear):
    """torch's own product, by cuBLAS."""

    name: ClassVar[str] = "cublas"

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        return device_refusal(device) or linear_plain.refusal(spec)


Key = tuple[int, int, bool, int]
"""(N, K, whether gated, T): a product whose time was measured."""


class TritonLinear(linear_plain.TritonLinear):
    """Triton's products of few tokens, and cuBLAS for more.

    table: the cut of each product that was measured, a `GemvConfig` or `SkinnyConfig`; None where cuBLAS won.
    """

    gates: ClassVar[tuple[str, ...]] = ("silu", "gelu", "gelu_tanh")
    table: ClassVar[Mapping[Key, Any]] = {}

    @classmethod
    def with_table(cls, table: Mapping[Key, Any]) -> type[TritonLinear]:
        """This kernel with a card's measurements."""
        return type(cls.__name__, (cls,), {"table": table, "__module__": cls.__module__, "__doc__": cls.__doc__})

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        if reason := few_tokens_refusal(spec, device):
            return reason
        if not any(cls.cuts(spec, device)):
            gated = "gated " if spec.gate else ""
            return f"not measured to be faster for {gated}{spec.out_features}x{spec.in_features} on this card"
        return ""

    @classmethod
    def cuts(cls, spec: LinearSpec, device: Device) -> tuple[Any, ...]:
        """Up to the most tokens that were measured; between two measurements the larger's."""
        shape = (spec.out_features, spec.in_features, spec.gate is not None)
        measured = {key[3]: cut for key, cut in cls.table.items() if key[:3] == shape}
        cuts: list[Any] = [None]
        for tokens in range(1, max(measured, default=0) + 1):
            # A cut for one token may do without the matrix unit, which several need.
            fits = [t for t in sorted(measured) if t >= tokens and (tokens == 1 or getattr(measured[t], "dot", True))]
            cuts.append(measured[fits[0]] if fits else None)
        return tuple(cuts)

    @classmethod
    def overlap_for(cls, device: Device) -> Overlap:
        from octavo_cuda.overlap import overlap_for

        return overlap_for(getattr(device, "capability", (0, 0)))
