"""Kernels of the acme platform: one so far."""

from __future__ import annotations

import torch

from octavo.plugin import YES, OpContext, Support, no


def takes_silu(context: OpContext) -> Support:
    kind = context.params.get("kind")
    return YES if kind == "silu" else no(f"the unit computes silu, not {kind}")


def act_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    """silu(gate) * up. x [T, 2 I], gate first; a new tensor [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return (gate.float() * torch.sigmoid(gate.float()) * up.float()).to(x.dtype)
