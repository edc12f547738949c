"""Random paged batches, and what dense attention makes of them: the oracle of tier 3.

sequence 0   |---- context ----|- new -|       "new" tokens are this step's queries; their K and V are written by
sequence 1   |-- context --|new|                `run`, everything before lies in the cache already
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention import quantized
from octavo.plugin import AttentionSpec, AttnBatch, Device, KVLayout, KVPlan, KVSpec, KVView
from octavo.runner.kvcache import allocate

POISON = 100.0
"""Fills what must never be seen: a large finite value, as a mask times NaN would blame correct kernels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch. lens: (context before the step, new tokens) of each sequence; padding of tokens and sequences."""

    spec: AttentionSpec
    lens: Sequence[tuple[int, int]]
    pad_tokens: int = 0
    pad_seqs: int = 0
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.lens)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The case on a device. keys, values: float32 K and V of whole sequences, on the CPU."""

    batch: AttnBatch
    q: Tensor
    k: Tensor
    v: Tensor
    kv: KVView
    sinks: Tensor | None
    keys: list[Tensor]
    values: list[Tensor]
    tables: list[list[int]]


def build(case: Case, layout: KVLayout, device: Device) -> Inputs:
    """Fill a poisoned cache with the contexts, blocks in random order."""
    spec, rng = case.spec, np.random.default_rng(case.seed)
    size, dtype = spec.block_size, getattr(torch, spec.dtype)
    lengths = [context + new for context, new in case.lens]
    blocks_of = [-(-length // size) for length in lengths]
    num_blocks = 1 + sum(blocks_of) + 4
    free = list(rng.permutation(np.arange(1, num_blocks - 1)))
    tables = [[int(free.pop()) for _ in range(n)] for n in blocks_of]
    width = max(blocks_of) + 1

    generator = torch.Generator().manual_seed(case.seed)
    shape = (spec.num_kv_heads, spec.head_dim)
    keys, values = (
        [torch.randn(length, *shape, generator=generator).to(dtype) for length in lengths] for _ in range(2)
    )
    q = torch.randn(case.num_tokens + case.pad_tokens, spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None

    kv_spec = kv_spec_of(spec)
    [view] = allocate(KVPlan(spec=kv_spec, num_layers=1, num_blocks=num_blocks), layout, device)
    with device.inference():
        for cache, sequences in ((view.k, keys), (view.v, values)):
            filled = torch.full((num_blocks, spec.num_kv_heads, size, spec.head_dim), POISON, dtype=dtype)
            for (context, _), table, tensor in zip(case.lens, tables, sequences, strict=True):
                for position in range(context):
                    filled[table[position // size], :, position % size] = tensor[position]
            cache.copy_(quantized(filled) if cache.dtype == torch.int8 else filled.to(cache.dtype))

    num_seqs = len(case.lens) + case.pad_seqs
    starts = np.zeros(num_seqs + 1, np.int32)
    starts[1:] = np.cumsum([*(new for _, new in case.lens), *[0] * case.pad_seqs])
    kv_lens = np.array([*lengths, *[0] * case.pad_seqs], np.int32)
    # As core's tables, a part of a wider one. Who takes its rows to lie side by side reads blocks of poison.
    block_table = np.full((num_seqs, width + 3), num_blocks - 1, np.int32)
    block_table[:, :width] = 0
    for row, table in enumerate(tables):
        block_table[row, : len(table)] = table
    slots = [
        table[position // size] * size + position % size
        for (context, new), table in zip(case.lens, tables, strict=True)
        for position in range(context, context + new)
    ] + [0] * case.pad_tokens

    def new_part(sequences: list[Tensor]) -> Tensor:
        parts = [tensor[context:] for (context, _), tensor in zip(case.lens, sequences, strict=True)]
        return torch.cat([*parts, torch.zeros(case.pad_tokens, *shape, dtype=dtype)]).to(device.torch_device)

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(device.torch_device)

    batch = AttnBatch(
        num_tokens=case.num_tokens + case.pad_tokens,
        num_seqs=num_seqs,
        num_decodes=leading_decodes(case.lens),
        max_q_len=max(new for _, new in case.lens),
        max_kv_len=max(lengths),
        q_starts=put(starts),
        kv_lens=put(kv_lens),
        block_table=put(block_table)[:, :width],
        slots=put(np.array(slots, np.int64)),
        q_starts_host=starts,
        kv_lens_host=kv_lens,
    )
    return Inputs(
        batch=batch,
        q=q.to(device.torch_device),
        k=new_part(keys),
        v=new_part(values),
        kv=view,
        sinks=None if sinks is None else sinks.to(device.torch_device),
        keys=[t.float() for t in keys],
        values=[t.float() for t in values],
        tables=tables,
    )


def kv_spec_of(spec: AttentionSpec) -> KVSpec:
    """The KV group of an attention spec."""
    return KVSpec(
        kind="full" if spec.window is None else "sliding",
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=spec.kv_dtype,
        window=spec.window,
    )


def leading_decodes(lens: Sequence[tuple[int, int]]) -> int:
    """How many sequences at the front have exactly one new token."""
    count = 0
    for _, new in lens:
        if new != 1:
            break
        count += 1
    return count


def dense(case: Case, inputs: Inputs) -> Tensor:
    """Float32 attention of every new token over all positions it may see: [num_tokens, H, D], written plainly."""
    spec, out, start = case.spec, [], 0
    repeat = spec.num_heads // spec.num_kv_heads
    for (context, new), keys, values in zip(case.lens, inputs.keys, inputs.values, strict=True):
        q = inputs.q[start : start + new].cpu().float()
        k, v = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        query = torch.arange(context, context + new)[:, None]
        key = torch.arange(context + new)[None]
        visible = key <= query
        if spec.window is not None:
            visible &= key > query - spec.window
        logits = logits.masked_fill(~visible, float("-inf"))
        if inputs.sinks is not None:
            sink = inputs.sinks.cpu().float()[:, None, None].expand(-1, new, 1)
            weights = torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = logits.softmax(dim=-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += new
    return torch.cat(out)


def with_block_size(case: Case, block_size: int) -> Case:
    return replace(case, spec=replace(case.spec, block_size=block_size))
