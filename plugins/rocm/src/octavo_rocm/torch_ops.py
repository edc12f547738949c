"""The HIP kernels as torch ops, so that tracing and fake tensors see one node.

octavo_rocm::gemv      y [T, N] = x [T, K] W^T + b for T <= 4, W plain or packed
octavo_rocm::unpack    W [N, K] in the format of activations
"""

# mypy: disable-error-code="no-untyped-call,untyped-decorator"
from __future__ import annotations

import torch

from octavo_rocm.products import Products, products_for

Tensor = torch.Tensor

LIBRARY = torch.library.Library("octavo_rocm", "DEF")
LIBRARY.define("gemv(Tensor x, Tensor weight, Tensor? groups, Tensor? bias, str weight_format) -> Tensor")
LIBRARY.define("unpack(Tensor weight, Tensor? groups, int num_in, str weight_format, ScalarType dtype) -> Tensor")


def gemv(x: Tensor, weight: Tensor, groups: Tensor | None, bias: Tensor | None, weight_format: str) -> Tensor:
    """The op. x: what `products.takes` says yes to."""
    y: Tensor = torch.ops.octavo_rocm.gemv(x, weight, groups, bias, weight_format)
    return y


def unpack(weight: Tensor, groups: Tensor | None, num_in: int, weight_format: str, dtype: torch.dtype) -> Tensor:
    """The op."""
    y: Tensor = torch.ops.octavo_rocm.unpack(weight, groups, num_in, weight_format, dtype)
    return y


def on_card(device: torch.device, weight_format: str, dtype: torch.dtype) -> Products:
    index = torch.cuda.current_device() if device.index is None else device.index
    return products_for(index, weight_format, str(dtype).removeprefix("torch."))


@torch.library.impl(LIBRARY, "gemv", "CUDA")
def gemv_on_card(x: Tensor, weight: Tensor, groups: Tensor | None, bias: Tensor | None, weight_format: str) -> Tensor:
    return on_card(x.device, weight_format, x.dtype).gemv(x, weight, groups, bias)


@torch.library.impl(LIBRARY, "unpack", "CUDA")
def unpack_on_card(
    weight: Tensor, groups: Tensor | None, num_in: int, weight_format: str, dtype: torch.dtype
) -> Tensor:
    return on_card(weight.device, weight_format, dtype).unpack(weight, groups, num_in, dtype)


@torch.library.register_fake("octavo_rocm::gemv", lib=LIBRARY)
def gemv_shape(x: Tensor, weight: Tensor, groups: Tensor | None, bias: Tensor | None, weight_format: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.register_fake("octavo_rocm::unpack", lib=LIBRARY)
def unpack_shape(weight: Tensor, groups: Tensor | None, num_in: int, weight_format: str, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((weight.shape[0], num_in), dtype=dtype)
