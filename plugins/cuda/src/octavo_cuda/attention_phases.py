"""One attention backend out of several: each phase of serving goes to the one that was fastest at it on this card.

    few decodes, many decodes   every sequence has one new token
    long prompts                few sequences, one of them with many new tokens
    mixed                       all else

    recorded step               | all of it: one backend, by the bounds of its shape              |
    eager step with long ones   | decodes ......................... | all others ................ |
                                  the backend of many decodes         the backend of long prompts

All parts read one cache (blocks, heads, tokens, content), which each of them takes as it lies: decoding, which reads
the most, is faster where a head's tokens lie side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from octavo.plugin import (
    YES,
    AttentionSpec,
    AttnBatch,
    AttnLayer,
    BatchLimits,
    Device,
    KVLayout,
    KVSpec,
    KVView,
    Support,
    no,
    start_step,
)
from octavo.plugin.recording import FEW_SEQS, LONG_TOKENS
from octavo_cuda.attention_choice import Phase, choose

Tensor = torch.Tensor

FEW_DECODES = 16


def phase_of(batch: AttnBatch, *, graph: bool) -> Phase:
    """The phase of a step. A recorded one shows the bounds of its shape instead of its lengths."""
    if batch.max_q_len == 1:
        return "few decodes" if batch.num_seqs <= FEW_DECODES else "many decodes"
    long = batch.max_q_len >= LONG_TOKENS and (batch.num_seqs <= FEW_SEQS or not graph)
    return "long prompts" if long else "mixed"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some tokens of a step, the backend that serves them, and its plan."""

    tokens: slice
    backend: Any
    plan: Any


class AutoAttention:
    """Implements `octavo.plugin.AttentionBackend` by others. candidates: the best first, if none is faster."""

    name: ClassVar[str] = "auto"
    takes_written_kv: ClassVar[bool] = False
    candidates: ClassVar[tuple[type[Any], ...]] = ()

    @classmethod
    def of(cls, *candidates: type[Any]) -> type[AutoAttention]:
        """This backend over others, which all must take a cache in the order BHNC."""
        names = {
            "candidates": candidates,
            "takes_written_kv": all(getattr(candidate, "takes_written_kv", False) for candidate in candidates),
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
        }
        return type(cls.__name__, (cls,), names)

    @classmethod
    def able(cls, spec: AttentionSpec, device: Device) -> list[type[Any]]:
        """The candidates that take layers of this kind."""
        return [candidate for candidate in cls.candidates if candidate.supports(spec, device).ok]

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        able = cls.able(spec, device)
        if len(able) < 2:
            return no(f"there is no choice: {able[0].name if able else 'no backend'} alone takes layers of this kind")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BHNC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        choice = choose(self.able(spec, device), spec, limits, device)
        self.why = choice.why
        made = {cls: cls(spec, limits, device) for cls in set(choice.best.values())}
        self._backends: Mapping[Phase, Any] = {phase: made[cls] for phase, cls in choice.best.items()}

    # -- once a step --

    def plan(self, batch: AttnBatch, *, graph: bool) -> list[Part]:
        """One plan for each part that the step has."""
        phase = phase_of(batch, graph=graph)
        backend, first = self._backends[phase], batch.num_decodes
        decoder = self._backends["many decodes"]
        if graph or phase != "long prompts" or first == 0 or decoder is backend:
            plan = backend.plan(batch, graph=graph)
            return [Part(tokens=slice(0, batch.num_tokens), backend=backend, plan=plan)]
        decodes, others = slice_batch(batch, 0, first), slice_batch(batch, first, batch.num_seqs)
        return [
            Part(tokens=slice(0, first), backend=decoder, plan=decoder.plan(decodes, graph=False)),
            Part(tokens=slice(first, None), backend=backend, plan=backend.plan(others, graph=False)),
        ]

    def start_step(self, plan: list[Part]) -> None:
        for part in plan:
            start_step(part.backend, part.plan)

    # -- once a layer --

    def run(
        self,
        layer: AttnLayer,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv: KVView,
        plan: list[Part],
        out: Tensor,
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`. Each part writes its own keys and values."""
        for part in plan:
            tokens = part.tokens
            new = (None, None) if k is None or v is None else (k[tokens], v[tokens])
            part.backend.run(layer, q[tokens], *new, kv, part.plan, out[tokens])
        return out


def slice_batch(batch: AttnBatch, start: int, end: int) -> AttnBatch:
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
