"""Core's linear layers with packed 4-bit weights, and the HIP kernel for up to 4 tokens where it can be compiled: both
read the same layout of codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.plugin import Device, LinearSpec
from octavo.triton import linear_int4
from octavo.triton.activation import act_and_mul
from octavo.triton.linear_tuning import ProductTuning
from octavo_rocm import products, torch_ops
from octavo_rocm.linear import few_tokens_refusal
from octavo_rocm.tuning import tuning_for

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PackedInt4(linear_int4.PackedInt4):
    """hip: whether the HIP kernel takes few tokens."""

    hip: bool


class Int4Linear(linear_int4.Int4Linear):
    __doc__ = linear_int4.Int4Linear.__doc__

    hip: ClassVar[bool] = True

    @classmethod
    def with_hip(cls, hip: bool) -> type[Int4Linear]:
        """This kernel with or without the HIP one."""
        names = {"hip": hip, "__module__": cls.__module__, "__doc__": cls.__doc__}
        return type(cls.__name__, (cls,), names)

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        return few_tokens_refusal(spec, device)

    @classmethod
    def tuning_for(cls, device: Device) -> ProductTuning:
        return tuning_for(device)

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> PackedInt4:
        """weights: canonical tensors of `spec.scheme`."""
        packed = super().prepare(weights, spec, device)
        return PackedInt4(**vars(packed), hip=self.hip and not products.objection(device, "Int4", spec.act_dtype))

    def apply(self, x: Tensor, w: linear_int4.PackedInt4, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] behind a gate."""
        assert isinstance(w, PackedInt4)
        if not (w.hip and products.takes(x)):
            return super().apply(x, w, bias)
        y = torch_ops.gemv(x, w.packed.words, w.packed.groups, bias, "Int4")
        return y if w.gate is None else act_and_mul(y, w.gate, overlap=w.tuning.overlap)
