"""A quantization format of acme's own, "acme_log8": a sign and a logarithm in one byte.

    code = 128 * (w < 0) + step        step 0: zero; step s > 0: |w| = 2 ^ ((s - TOP) / octave_steps)
    config.json: "quantization_config": {"quant_method": "acme_log8", "octave_steps": 8,
                                         "skip": ["lm_head", "model.embed_tokens"]}
    checkpoint:  "NAME.weight" uint8 [N, K], without scales: logarithms have range enough

Core asks for the scheme of embeddings as well, hence `skip`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.plugin import QuantScheme

PACKING = "acme_log8"
TOP = 111
"""The step of 1.0; 16 steps are left for larger weights."""


class Log8:
    """Implements `octavo.plugin.QuantFormat`. Raises ValueError for steps that are not there."""

    name: ClassVar[str] = PACKING

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == PACKING

    def __init__(self, config: Mapping[str, Any]) -> None:
        steps = config.get("octave_steps", 8)
        if not isinstance(steps, int) or not 1 <= steps <= 32:
            raise ValueError(f"{PACKING}: octave_steps must be between 1 and 32, not {steps!r}")
        # What the codes mean goes into the packing: layers of different codes must not be multiplied as one.
        self._scheme = QuantScheme(weight="uint8", granularity="tensor", packing=f"{PACKING}:{steps}")
        self._skip = frozenset(config.get("skip", ()))

    def scheme(self, layer: str) -> QuantScheme | None:
        return None if layer in self._skip else self._scheme


def octave_steps(scheme: QuantScheme) -> int:
    """How many codes halve a weight."""
    return int(scheme.packing.partition(":")[2])


def codebook(steps: int) -> Tensor:
    """float32 [256]: the weight of each code."""
    size = torch.exp2((torch.arange(128) - TOP) / steps)
    size[0] = 0.0
    return torch.cat([size, -size])


def quantize(weight: Tensor, steps: int) -> Tensor:
    """The nearest codes, uint8, of a weight of any shape."""
    step = (weight.abs().float().log2() * steps + TOP).round()
    # What is too small for the least step becomes zero, and log2(0) is -inf.
    code = step.clamp(0, 127).to(torch.uint8)
    return code + 128 * ((weight < 0) & (code > 0)).to(torch.uint8)
