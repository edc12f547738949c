"""Quantizing a plain checkpoint while it is loaded: `--quantization fp8`.

The scheme of such a weight says "online:...": its canonical tensor is still the plain "weight" [N, K], and the kernel
that takes the scheme quantizes it in `prepare`. A platform without such a kernel serves the same numbers from the
reference, which rounds weights and activations to fp8 and multiplies what they stand for: the quality is that of fp8,
the memory and the speed are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from octavo.plugin.specs import QuantScheme

FAMILY = "online"

SCHEMES: Mapping[str, QuantScheme] = {
    "fp8": QuantScheme(
        weight="fp8_e4m3", act="fp8_e4m3", granularity="channel", dynamic_act=True, packing=f"{FAMILY}:fp8"
    )
}
"""What `--quantization` may ask of a plain checkpoint."""

KEPT = ("lm_head", "embed_tokens")
"""Modules that stay plain: rounding the vocabulary's ends costs more quality than it saves time."""


def scheme_of(method: str) -> Callable[[str], QuantScheme | None]:
    """The scheme of every linear layer, by checkpoint name."""
    scheme = SCHEMES[method]
    return lambda name: None if name.endswith(KEPT) else scheme


def is_plain(scheme: QuantScheme | None) -> bool:
    """Whether the checkpoint's tensor is a plain weight: no scheme, or one that is yet to be applied."""
    return scheme is None or scheme.packing.startswith(f"{FAMILY}:")


FP8 = torch.float8_e4m3fn
SMALLEST_SCALE = 1e-12
"""A row of zeros must not divide by zero."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [R, K], scale float32 [R, 1]) of x [R, K]: each row's largest magnitude becomes 448."""
    largest = torch.finfo(FP8).max
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp_min(SMALLEST_SCALE) / largest
    return (x.float() / scale).clamp(-largest, largest).to(FP8), scale


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """x [R, K] as `quantize_rows` keeps it, in x's dtype."""
    values, scale = quantize_rows(x)
    return (values.float() * scale).to(x.dtype)


def decode(weights: Mapping[str, torch.Tensor], scheme: QuantScheme, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] after quantization: the checkpoint's is plain."""
    return round_rows(weights["weight"]).to(dtype)
