"""Quantizing a plain checkpoint while it is loaded: `--quantization fp8 | int8 | int8_per_channel_weight_only | int4`.

The scheme of such a weight says "online:...": its canonical tensor is still the plain "weight" [N, K], and the kernel
that takes the scheme quantizes it in `prepare`. A platform without such a kernel serves the same numbers from the
reference, which rounds weights (and, for fp8 and int8, activations) and multiplies what they stand for: the quality is
that of the format, the memory and the speed are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from octavo.errors import UnsupportedModelError
from octavo.plugin.quant import MatrixSpec, QuantLayer, plain_weight
from octavo.plugin.specs import QuantScheme

FAMILY = "online"


def is_plain(scheme: QuantScheme | None) -> bool:
    """Whether the checkpoint's tensor is a plain weight: no scheme, or one that is yet to be applied."""
    return scheme is None or scheme.packing.startswith(f"{FAMILY}:")


FP8 = torch.float8_e4m3fn
SMALLEST_SCALE = 1e-12
"""A row of zeros must not divide by zero."""


def quantize_rows(x: torch.Tensor, number: str = "fp8_e4m3") -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, K], scale float32 [R, 1]) of x [R, K], codes in float8_e4m3fn or, for number "int8", in int8: each
    row's largest magnitude becomes the number's, 448 or 127."""
    most = x.abs().amax(dim=1, keepdim=True).float().clamp_min(SMALLEST_SCALE)
    if number == "int8":
        return torch.round(x.float() * (torch.full_like(most, 127.0) / most)).to(torch.int8), most / 127
    largest = torch.finfo(FP8).max
    scale = most / largest
    return (x.float() / scale).clamp(-largest, largest).to(FP8), scale


GROUP = 32
"""Columns of one scale and offset of int4."""


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [N, K] in 0..15, scale, offset float32 [N, K / 32]) of weight [N, K]: the least and the largest of
    32 columns become 0 and 15. Scales and offsets are numbers that float16 holds. Raises UnsupportedModelError if K is
    not a multiple of 32."""
    if weight.shape[1] % GROUP:
        raise UnsupportedModelError(
            f"--quantization int4 needs input features in multiples of {GROUP}, not {weight.shape[1]}: leave it out"
        )
    groups = weight.float().reshape(len(weight), -1, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    offset, scale = least.half().float(), ((most - least) / 15).half().float()
    steps = (groups - offset[..., None]) / torch.where(scale > 0, scale, 1.0)[..., None]
    return torch.round(steps).clamp(0, 15).to(torch.uint8).flatten(1), scale, offset


def round_rows(x: torch.Tensor, number: str = "fp8_e4m3") -> torch.Tensor:
    """x [R, K] as `quantize_rows` keeps it, in x's dtype."""
    values, scale = quantize_rows(x, number)
    return (values.float() * scale).to(x.dtype)


def decode(weights: Mapping[str, torch.Tensor], scheme: QuantScheme, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] after quantization: the checkpoint's is plain."""
    if scheme.weight == "int4":
        codes, scale, offset = quantize_groups(weights["weight"])
        return (codes.view(*scale.shape, GROUP).float() * scale[..., None] + offset[..., None]).flatten(1).to(dtype)
    return round_rows(weights["weight"], scheme.weight).to(dtype)


def _int4_groups(
    weights: Mapping[str, torch.Tensor], scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return quantize_groups(weights["weight"])


def _scheme(method: str, **fields: Any) -> QuantScheme:
    return QuantScheme(packing=f"{FAMILY}:{method}", dequantize=decode, **fields)


SCHEMES: Mapping[str, QuantScheme] = {
    "fp8": _scheme("fp8", weight="fp8_e4m3", act="fp8_e4m3", granularity="channel", dynamic_act=True),
    "int8": _scheme("int8", weight="int8", act="int8", granularity="channel", dynamic_act=True),
    "int8_per_channel_weight_only": _scheme("int8_per_channel_weight_only", weight="int8", granularity="channel"),
    "int4": _scheme("int4", weight="int4", group=(1, 32), symmetric=False, int4_groups=_int4_groups),
}
"""What `--quantization` may ask of a plain checkpoint."""


class Online:
    """Implements `octavo.plugin.QuantFormat` for `SCHEMES`. The vocabulary's ends stay plain: rounding them costs more
    quality than it saves time."""

    name: ClassVar[str] = FAMILY

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == FAMILY and config.get("method") in SCHEMES

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._scheme = SCHEMES[config["method"]]

    def layer(self, spec: MatrixSpec) -> QuantLayer | None:
        if spec.kind != "linear":
            return None
        return QuantLayer(scheme=self._scheme, tensors={"weight": plain_weight(spec)})
