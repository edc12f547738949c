"""A minimal paged runner: any mix of sequences in a step, shuffled block tables, NaN where nobody may read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch

from octavo.extensions import load_extensions, resolve
from octavo.layers.context import BuildContext, StepState, dtype_name
from octavo.ops.bind import KernelTable
from octavo.parallel.communicator import SingleRank
from octavo.plugin.contracts import AttnBatch, KVView, start_step
from octavo.plugin.specs import BatchLimits
from octavo.plugin.torch import TorchDevice
from octavo.quant.formats import layers_of
from octavo.testing.tiny import make_model
from octavo.weights import loader
from octavo.weights.source import open_model

BLOCK_SIZE = 4
PADDING = 2
"""Tokens and sequences that pad every step, as a bucketed platform's would."""


class PagedModel:
    """A loaded model with its KV cache. `step` takes new tokens of some sequences."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        max_model_len: int = 128,
        comm: Any = None,
        dequantize: bool = False,
        kernels: KernelTable | None = None,
        seed: int = 0,
    ) -> None:
        self.source = open_model(str(folder))
        self.ctx = BuildContext(
            device=TorchDevice("cpu"),
            dtype=dtype,
            kv_dtype=dtype_name(dtype),
            block_size=BLOCK_SIZE,
            limits=BatchLimits(max_num_tokens=256, max_num_seqs=8, max_model_len=max_model_len),
            kernels=kernels or KernelTable(),
            comm=comm or SingleRank(),
            quant=layers_of(load_extensions().quant_formats, self.source.quant_config),
            dequantize=dequantize,
        )
        cls = resolve(load_extensions().models[self.source.config.model_type])
        self.model = cls(self.source.config, self.ctx)
        loader.load(self.ctx.weights, self.source)
        self.groups = self.ctx.attention.kv_specs
        self.random = random.Random(seed)
        num_blocks = 8 * -(-max_model_len // BLOCK_SIZE) + 1
        self.free = [self.random.sample(range(1, num_blocks), num_blocks - 1) for _ in self.groups]
        self.kv = [self._cache(self.groups[self._group_of(i)], num_blocks) for i in range(self._num_layers)]
        self.lengths: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}

    @property
    def _num_layers(self) -> int:
        return len(self.ctx.attention.spec_of_layer)

    def _group_of(self, layer: int) -> int:
        return self.ctx.attention.kv_of_spec[self.ctx.attention.spec_of_layer[layer]]

    def _cache(self, spec: Any, num_blocks: int) -> KVView:
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        return KVView(k=torch.full(shape, torch.nan, dtype=dtype), v=torch.full(shape, torch.nan, dtype=dtype))

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """work: (sequence, its next tokens), decodes first. Returns hidden states [n, hidden] for each."""
        ids, positions = [0] * PADDING, [0] * PADDING
        ids[:0] = [token for _, tokens in work for token in tokens]
        starts = [self.lengths.get(seq, 0) for seq, _ in work]
        counts = [len(tokens) for _, tokens in work]
        positions[:0] = [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        for (seq, _), end in zip(work, ends, strict=True):
            self.lengths[seq] = end
            self._grow(seq, end)
        batches = [self._attention(g, work, starts, counts, ends) for g in range(len(self.groups))]
        attention = self.ctx.attention
        plans = [
            backend.plan(batches[group], graph=False)
            for backend, group in zip(attention.backends, attention.kv_of_spec, strict=True)
        ]
        for backend, plan in zip(attention.backends, plans, strict=True):
            start_step(backend, plan)
        slots = [batch.slots for batch in batches]
        state = StepState(positions=torch.tensor(positions), slots=slots, plans=plans, kv=self.kv)
        hidden = self.model.forward(torch.tensor(ids), state)
        return list(hidden[: sum(counts)].split(counts))

    def _grow(self, seq: int, length: int) -> None:
        tables = self.tables.setdefault(seq, [[] for _ in self.groups])
        for table, free in zip(tables, self.free, strict=True):
            while len(table) * BLOCK_SIZE < length:
                table.append(free.pop())

    def _attention(
        self, group: int, work: Sequence[Any], starts: Sequence[int], counts: Sequence[int], ends: Sequence[int]
    ) -> AttnBatch:
        width = max(-(-end // BLOCK_SIZE) for end in ends)
        table = np.zeros((len(work) + PADDING, width), np.int32)
        slots: list[int] = []
        for i, (seq, _) in enumerate(work):
            row = self.tables[seq][group]
            window = self.groups[group].window
            # What lies behind the window of the first query belongs to others: its entries name the null block.
            dead = max(0, starts[i] - window + 1) // BLOCK_SIZE if window else 0
            table[i, dead : -(-ends[i] // BLOCK_SIZE)] = row[dead : -(-ends[i] // BLOCK_SIZE)]
            slots += [row[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(starts[i], ends[i])]
        q_starts = np.array([0, *np.cumsum(counts), *[sum(counts)] * PADDING], np.int32)
        kv_lens = np.array([*ends, *[0] * PADDING], np.int32)
        return AttnBatch(
            num_tokens=sum(counts) + PADDING,
            num_seqs=len(work) + PADDING,
            num_decodes=next((i for i, n in enumerate(counts) if n > 1), len(counts)),
            max_q_len=max(counts),
            max_kv_len=max(ends),
            q_starts=torch.from_numpy(q_starts),
            kv_lens=torch.from_numpy(kv_lens),
            block_table=torch.from_numpy(table),
            slots=torch.tensor(slots + [0] * PADDING),
            q_starts_host=q_starts,
            kv_lens_host=kv_lens,
        )

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], *, max_chunk: int = 12, last: int = 0) -> list[torch.Tensor]:
        """Logits of the `last` positions (0: all) of all prompts, by random steps: some sequences advance one token,
        some a chunk."""
        out: list[list[torch.Tensor]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
            open_ = [i for i, p in enumerate(prompts) if done[i] < len(p)]
            chosen = self.random.sample(open_, self.random.randint(1, len(open_)))
            sizes = {i: self.random.choice((1, 1, self.random.randint(1, max_chunk))) for i in chosen}
            chosen.sort(key=lambda i: sizes[i] > 1)
            work = [(i, prompts[i][done[i] : done[i] + sizes[i]]) for i in chosen]
            for (i, tokens), hidden in zip(work, self.step(work), strict=True):
                out[i].append(hidden)
                done[i] += len(tokens)
        return [self.model.logits(torch.cat(parts)[-last:]) for parts in out]


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Callable[..., Path]:
    """(model_type, **config overrides) -> folder of a random model with tokenizer-less checkpoint."""

    def make(model_type: str, **overrides: Any) -> Path:
        return make_model(tmp_path / model_type, model_type, tokenizer=False, **overrides)

    return make


@pytest.fixture
def paged() -> type[PagedModel]:
    return PagedModel


@pytest.fixture
def prompts() -> list[list[int]]:
    """Token ids of sequences of uneven length, one of them a single token."""
    generator = random.Random(7)
    return [[generator.randrange(3, 384) for _ in range(n)] for n in (37, 1, 18, 53, 9)]
