"""How a card runs its products of few tokens: what the linear layers of `octavo.triton` ask of a platform."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.triton import gemv, int4, skinny
from octavo.triton.overlap import IN_ORDER, Overlap

GATES = ("silu", "gelu", "gelu_tanh")
"""Kinds of `act_and_mul` that the products apply themselves."""


@dataclass(frozen=True, kw_only=True)
class ProductTuning:
    """Cuts by arithmetic; a platform that measured, or has other limits, overrides them.

    overlap: how kernels start, and the launch options of the target. units: compute units of the card, by default those
    of the card on which the arithmetic was fitted. skinny_tokens: up to how many the product in fp8 is `skinny`'s, at
    most `skinny.MAX_ROWS`; torch's own makes those of more.
    """

    overlap: Overlap = field(default_factory=lambda: IN_ORDER)
    units: int = 132
    skinny_tokens: int = 64

    def gemv(self, num_out: int, num_in: int, tokens: int) -> gemv.GemvConfig:
        """Of up to `gemv.MAX_ROWS` tokens, at least one."""
        return gemv.default_config(num_out, num_in, tokens, num_cores=self.units)

    def int4(self, num_out: int, num_in: int, tokens: int) -> int4.Int4Config:
        """Of up to `int4.MAX_ROWS` tokens, at least one."""
        return int4.default_config(num_out, num_in, tokens, num_cores=self.units)

    def skinny(self, num_out: int, num_in: int, tokens: int, *, itemsize: int) -> skinny.SkinnyConfig:
        """Of up to `skinny.MAX_ROWS` tokens, at least one. itemsize: bytes of a weight."""
        return skinny.default_config(num_out, num_in, tokens, num_cores=self.units, itemsize=itemsize)
