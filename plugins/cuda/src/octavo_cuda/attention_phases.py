"""Each phase to the kernel that was measured to be fastest in it: prompts to FlashAttention 3, decodes to Triton.

    eager mixed step    | decodes ...... | prompts ............ |
                          Triton           FlashAttention 3
    recorded mixed step | all of it: FlashAttention 3, since how many decode is not known when it is recorded

Measured on an H200: benchmarks/results/h200-2026-11-29.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, Device, KVLayout, KVSpec, KVView, Support
from octavo_cuda.attention import Fa3Attention

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """num_decodes: how many of the first tokens go to `decode`; the rest go to `prompts`. None: no such tokens."""

    num_decodes: int
    decode: Any
    prompts: Any


class PhaseAttention:
    """Implements `octavo.plugin.AttentionBackend` by two others. decoder: that of decodes, see `with_decoder`."""

    name: ClassVar[str] = "fa3+triton"
    decoder: ClassVar[type[Any]]

    @classmethod
    def with_decoder(cls, decoder: Any) -> type[PhaseAttention]:
        """This backend with the Triton backend of a card."""
        return type(cls.__name__, (cls,), {"decoder": decoder, "__module__": cls.__module__, "__doc__": cls.__doc__})

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        answer: Support = cls.decoder.supports(spec, device)
        return Fa3Attention.supports(spec, device) if answer.ok else answer

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return Fa3Attention.kv_layout(spec)

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self._decode = type(self).decoder(spec, limits, device)
        self._prompts = Fa3Attention(spec, limits, device)

    def plan(self, batch: AttnBatch, *, graph: bool) -> PhasePlan:
        """One plan for each phase that the step has."""
        if batch.max_q_len == 1:
            return PhasePlan(num_decodes=batch.num_tokens, decode=self._decode.plan(batch, graph=graph), prompts=None)
        first = 0 if graph else batch.num_decodes
        if first == 0:
            return PhasePlan(num_decodes=0, decode=None, prompts=self._prompts.plan(batch, graph=graph))
        return PhasePlan(
            num_decodes=first,
            decode=self._decode.plan(_part(batch, 0, first), graph=False),
            prompts=self._prompts.plan(_part(batch, first, batch.num_seqs), graph=False),
        )

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, kv: KVView, plan: PhasePlan, out: Tensor
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`. Each part writes its own keys and values."""
        n = plan.num_decodes
        if plan.decode is not None:
            self._decode.run(layer, q[:n], k[:n], v[:n], kv, plan.decode, out[:n])
        if plan.prompts is not None:
            self._prompts.run(layer, q[n:], k[n:], v[n:], kv, plan.prompts, out[n:])
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
