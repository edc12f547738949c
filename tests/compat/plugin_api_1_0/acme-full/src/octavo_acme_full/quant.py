"""A quantization format of acme's own, "acme_groups": 4-bit codes, and a scale for every group of columns.

    W[n, k] = (code[n, k] - 8) * scale[n, k // group]
    config.json: "quantization_config": {"quant_method": "acme_groups", "group_size": 32, "ignore": ["lm_head"]}
    checkpoint:  NAME.weight_packed uint8 [N, K / 2]: columns 2 i and 2 i + 1 in the low and high half of byte i
                 NAME.weight_scale float16 [N, K / group]

The platform multiplies the codes as they are. All others serve the format as well, by `dequantize`; those with a kernel
for 4-bit groups of 32 columns keep it in 4 bits, by `int4_groups`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.plugin import Along, MatrixSpec, QuantLayer, QuantScheme, QuantTensor

NAME = "acme_groups"
ZERO = 8
"""The code of 0."""


class AcmeGroups:
    """Implements `octavo.plugin.QuantFormat`. Raises ValueError for a group that is none."""

    name: ClassVar[str] = NAME

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == NAME

    def __init__(self, config: Mapping[str, Any]) -> None:
        group = config.get("group_size", 32)
        if not isinstance(group, int) or group < 2 or group % 2:
            raise ValueError(f"group_size must be an even number, not {group!r}")
        self._ignore = frozenset(config.get("ignore", ()))
        self._scheme = QuantScheme(
            weight="int4",
            group=(1, group),
            # All that decides what the codes mean: weights of equal schemes are multiplied as one.
            packing=f"{NAME}:{group}",
            dequantize=dequantize,
            int4_groups=int4_groups if group % 32 == 0 else None,
        )

    def layer(self, spec: MatrixSpec) -> QuantLayer | None:
        # Embeddings are looked up, not multiplied: they stay as they are.
        if spec.kind == "embedding" or spec.name in self._ignore:
            return None
        rows, columns, group = spec.out_features, spec.in_features, group_of(self._scheme)
        if columns % group:
            raise ValueError(f"{columns} columns are no whole groups of {group}")
        along = Along(dim=0)
        return QuantLayer(
            scheme=self._scheme,
            tensors={
                "weight_packed": QuantTensor(
                    shape=(rows, columns // 2), dtype="uint8", rows=along, columns=Along(dim=1, features=2)
                ),
                "weight_scale": QuantTensor(
                    shape=(rows, columns // group), dtype="float16", rows=along, columns=Along(dim=1, features=group)
                ),
            },
        )


def group_of(scheme: QuantScheme) -> int:
    """Columns of one scale."""
    assert scheme.group is not None
    return scheme.group[1]


def codes_of(packed: Tensor) -> Tensor:
    """uint8 [N, K / 2] -> uint8 [N, K], 0 to 15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def dequantize(weights: Mapping[str, Tensor], scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """The weight [N, K]: the reference of this format."""
    scale = weights["weight_scale"].float().repeat_interleave(group_of(scheme), dim=1)
    return ((codes_of(weights["weight_packed"]).float() - ZERO) * scale).to(dtype)


def int4_groups(weights: Mapping[str, Tensor], scheme: QuantScheme) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [N, K], scale, offset [N, K / 32]), as `octavo.plugin.torch.int4_groups` says."""
    scale = weights["weight_scale"].float().repeat_interleave(group_of(scheme) // 32, dim=1)
    return codes_of(weights["weight_packed"]), scale, -ZERO * scale


def quantize(weight: Tensor, group: int) -> dict[str, Tensor]:
    """The tensors of a weight [N, K]: what a tool that writes checkpoints would put into the file."""
    groups = weight.float().reshape(len(weight), -1, group)
    scale = (groups.abs().amax(-1) / (ZERO - 1)).half()
    codes = (groups / scale.float()[..., None].clamp_min(1e-12)).round().clamp(-ZERO, ZERO - 1) + ZERO
    low, high = codes.to(torch.uint8).flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return {"weight_packed": low | high << 4, "weight_scale": scale}
