"""Quantizing a plain checkpoint while it is loaded: `--quantization fp8`.

The scheme of such a weight says "online:...": its canonical tensor is still the plain "weight" [N, K], and the kernel
that takes the scheme quantizes it in `prepare`. A platform without such a kernel multiplies the plain weight.
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


def decode(weights: Mapping[str, torch.Tensor], scheme: QuantScheme, dtype: torch.dtype) -> torch.Tensor:
    """The plain weight [N, K], which nobody has quantized."""
    return weights["weight"].to(dtype)
