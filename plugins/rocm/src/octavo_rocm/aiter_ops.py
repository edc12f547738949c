"""Core's ops by AITER's functions, and the test that they pass before they serve."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

TOLERANCE = 2e-2


@cache
def library() -> Any:
    """The imported package."""
    return import_module("aiter")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op `rms_norm`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.numel():
        return torch.empty_like(x)
    y: Tensor = library().rms_norm(rows, weight.to(x.dtype), eps)
    return y.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op `add_rms_norm`."""
    normed, total = torch.empty_like(x), torch.empty_like(residual)
    if x.numel():
        library().rmsnorm2d_fwd_with_add(normed, x, residual, total, weight.to(x.dtype), eps)
    return normed, total


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """The op `act_and_mul`, for silu."""
    assert kind == "silu", kind
    y = x.new_empty((x.shape[0], x.shape[1] // 2))
    if y.numel():
        library().silu_and_mul(y, x.contiguous())
    return y


@cache
def objection(device: torch.device) -> str:
    """Why the package is of no use on a device; empty if it computes right there."""
    try:
        return self_test(device)
    except Exception as error:  # whatever breaks in the other package is a reason to do without it
        return f"AITER cannot be used: {(str(error) or type(error).__name__).splitlines()[0]}"


def self_test(device: torch.device) -> str:
    """What is wrong with the functions, judged by torch; empty if nothing is."""
    numbers = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 512, generator=numbers).to(device, torch.bfloat16) for _ in range(2))
    weight = torch.rand(512, generator=numbers).to(device, torch.bfloat16)
    total = (x + residual).float()
    normed = F.rms_norm(total, (512,), weight.float(), 1e-5)
    gate, up = x.float().chunk(2, dim=-1)
    found, found_total = add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    checks = {
        "rms_norm": (rms_norm(x, weight, 1e-5), F.rms_norm(x.float(), (512,), weight.float(), 1e-5)),
        "add_rms_norm": (found, normed),
        "add_rms_norm's sum": (found_total, total),
        "act_and_mul": (act_and_mul(x, "silu"), F.silu(gate) * up),
    }
    for name, (got, expected) in checks.items():
        if not (off := float((got.float() - expected).abs().max())) <= TOLERANCE * float(expected.abs().max()):
            return f"{name} of AITER fails its self-test: off by {off:.3g}"
    return ""
