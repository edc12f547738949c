"""Long prompts to FlashAttention 3, the rest to Triton.

    eager step with a long prompt | decodes ...... | prompts ............ |
                                    Triton           FlashAttention 3
    any other step                | all of it: Triton, whose kernels part decodes and prompts on the device

Recorded steps reach up to `graphs.MIXED_TOKENS`, so an eager step is one of more tokens, or of --enforce-eager.
Measured on an H200: benchmarks/results/h200-2026-11-29.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, Device, KVLayout, KVSpec, KVView, Support
from octavo_cuda.attention import Fa3Attention

Tensor = torch.Tensor


LONG = 1024
"""Query tokens of a sequence from which FlashAttention 3 pays."""


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """num_first: how many of the first tokens go to `triton`; the rest go to `fa3`. None: no such tokens."""

    num_first: int
    triton: Any
    fa3: Any


class PhaseAttention:
    """Implements `octavo.plugin.AttentionBackend` by two others. triton: of all but long prompts."""

    name: ClassVar[str] = "fa3+triton"
    takes_written_kv: ClassVar[bool] = True
    triton: ClassVar[type[Any]]

    @classmethod
    def with_triton(cls, triton: Any) -> type[PhaseAttention]:
        """This backend with the Triton backend of a card."""
        return type(cls.__name__, (cls,), {"triton": triton, "__module__": cls.__module__, "__doc__": cls.__doc__})

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        answer: Support = cls.triton.supports(spec, device)
        return Fa3Attention.supports(spec, device) if answer.ok else answer

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return Fa3Attention.kv_layout(spec)

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self._triton = type(self).triton(spec, limits, device)
        self._fa3 = Fa3Attention(spec, limits, device)

    def plan(self, batch: AttnBatch, *, graph: bool) -> PhasePlan:
        """One plan for each part that the step has."""
        if graph or batch.max_q_len < LONG:
            return PhasePlan(num_first=batch.num_tokens, triton=self._triton.plan(batch, graph=graph), fa3=None)
        first = batch.num_decodes
        if first == 0:
            return PhasePlan(num_first=0, triton=None, fa3=self._fa3.plan(batch, graph=False))
        return PhasePlan(
            num_first=first,
            triton=self._triton.plan(_part(batch, 0, first), graph=False),
            fa3=self._fa3.plan(_part(batch, first, batch.num_seqs), graph=False),
        )

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KVView, plan: PhasePlan, out: Tensor
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`. Each part writes its own keys and values."""
        n = plan.num_first
        first, rest = slice(0, n), slice(n, None)
        for backend, part, tokens in ((self._triton, plan.triton, first), (self._fa3, plan.fa3, rest)):
            if part is not None:
                new = (None, None) if k is None or v is None else (k[tokens], v[tokens])
                backend.run(layer, q[tokens], *new, kv, part, out[tokens])
        return out


def _part(batch: AttnBatch, start: int, end: int) -> AttnBatch:
    """The leading decodes (start 0), or the sequences from `start` on behind them, as a step of their own."""
    decodes = start == 0
    tokens = slice(0, end) if decodes else slice(start, batch.num_tokens)
    seqs, starts = slice(start, end), slice(start, end + 1)
    return replace(
        batch,
        num_tokens=tokens.stop - tokens.start,
        num_seqs=end - start,
        num_decodes=end if decodes else 0,
        max_q_len=1 if decodes else batch.max_q_len,
        q_starts=batch.q_starts[starts] if decodes else batch.q_starts[starts] - start,
        kv_lens=batch.kv_lens[seqs],
        block_table=batch.block_table[seqs],
        slots=batch.slots[tokens],
        q_starts_host=batch.q_starts_host[starts] - start,
        kv_lens_host=batch.kv_lens_host[seqs],
    )
