"""Whole models and every op on cards that are not there: tensors have shapes, strides and dtypes, but no memory
(torch's "meta" device).

What runs is the plugin's Python; a launch only looks at its arguments. Nothing can wait for the card unseen: torch
refuses to read a number of such a tensor, and to copy it to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime import interpreter

from octavo.extensions import load_extensions, resolve
from octavo.layers.context import BuildContext, StepState
from octavo.ops.bind import KernelTable
from octavo.ops.catalogue import CATALOGUE
from octavo.parallel.communicator import SingleRank
from octavo.plugin import AttnBatch, BatchLimits, DeviceDesc, KVView, MemInfo
from octavo.plugin.contracts import start_step
from octavo.plugin.torch import TorchDevice
from octavo.testing.tiny import make_model
from octavo.weights.source import open_model
from octavo_rocm import products, torch_ops
from octavo_rocm.ops import register

if torch.cuda.is_available():
    pytest.skip("the fake card would be a real one", allow_module_level=True)

CARD = torch.device("meta")
BLOCK = 16
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=8, max_model_len=128)
PREFILL, DECODE = [(0, 40), (0, 3)], [(40, 1), (3, 1)]
"""(context before, new tokens) of each sequence."""


class FakeCard(TorchDevice):
    """A card to the kernels, and to torch a name."""

    def __init__(self, arch: str) -> None:
        super().__init__("cpu", memory=lambda: MemInfo(total=1 << 36, free=1 << 36))
        self.type, self.arch, self._device = "cuda", arch, CARD

    def describe(self) -> DeviceDesc:
        return DeviceDesc(name="AMD", compute_units=304)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched, in order."""
    names: list[str] = []

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)
        assert all(isinstance(n, int) and n > 0 for n in self.grid), f"{self.fn.__name__}: grid {self.grid}"
        for value in [*args, *kwargs.values()]:
            if isinstance(value, torch.Tensor):
                assert value.device == CARD, f"{self.fn.__name__} is given memory of {value.device}"

    multiply = torch_ops.gemv

    def gemv(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        names.append("gemv")
        return multiply(x, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(torch_ops, "gemv", gemv)
    monkeypatch.setattr(products, "card_objection", lambda *arguments: "")
    return names


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, without its numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str = "nowhere"

    def read(self, *, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        shape = list(self.shape)
        if shape:
            shape[dim] = shape[dim] - start if length is None else length
        return torch.empty(shape, dtype=self.dtype)


def table_of(arch: str) -> tuple[KernelTable, FakeCard]:
    table, card = KernelTable(), FakeCard(arch)
    register(table, card, triton=True, hip=True)
    return table, card


def batch_of(lens: list[tuple[int, int]]) -> AttnBatch:
    counts, ends = [new for _, new in lens], [context + new for context, new in lens]
    starts = np.append(0, np.cumsum(counts)).astype(np.int32)
    width = LIMITS.max_model_len // BLOCK + 1

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=CARD)

    return AttnBatch(
        num_tokens=sum(counts),
        num_seqs=len(lens),
        num_decodes=sum(new == 1 for new in counts),
        max_q_len=max(counts),
        max_kv_len=max(ends),
        q_starts=empty(len(lens) + 1),
        kv_lens=empty(len(lens)),
        block_table=empty(len(lens), width),
        slots=empty(sum(counts), dtype=torch.int64),
        q_starts_host=starts,
        kv_lens_host=np.array(ends, np.int32),
    )


@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
@torch.inference_mode()
def test_a_model_takes_a_prompt_and_a_token_on_a_card_that_is_not_there(
    model_type: str, arch: str, tmp_path: Path, launched: list[str]
) -> None:
    source = open_model(str(make_model(tmp_path, model_type, tokenizer=False)))
    table, card = table_of(arch)
    ctx = BuildContext(
        device=card,
        dtype=torch.bfloat16,
        kv_dtype="bfloat16",
        block_size=BLOCK,
        limits=LIMITS,
        kernels=table,
        comm=SingleRank(),
    )
    model = resolve(load_extensions().models[source.config.model_type])(source.config, ctx)
    for name, slot in ctx.weights.slots.items():
        slot.load(Stored(name, slot.shape, torch.bfloat16))
    for finish in ctx.weights.finishers:
        finish()
    attention = ctx.attention
    assert {type(backend).name for backend in attention.backends} == {"triton"}
    kv = []
    for spec_index in attention.spec_of_layer:
        spec = attention.kv_specs[attention.kv_of_spec[spec_index]]
        shape = (20, spec.num_kv_heads, spec.block_size, spec.head_dim)
        k, v = (torch.empty(shape, dtype=torch.bfloat16, device=CARD) for _ in range(2))
        kv.append(KVView(k=k, v=v))
    for lens in (PREFILL, DECODE):
        launched.clear()
        batches = [batch_of(lens) for _ in attention.kv_specs]
        plans = [b.plan(batches[g], graph=False) for b, g in zip(attention.backends, attention.kv_of_spec, strict=True)]
        num_tokens = batches[0].num_tokens
        for backend, plan in zip(attention.backends, plans, strict=True):
            start_step(backend, plan)
        positions, ids = (torch.empty(num_tokens, dtype=kind, device=CARD) for kind in (torch.int64, torch.int32))
        state = StepState(positions=positions, slots=[b.slots for b in batches], plans=plans, kv=kv)
        hidden = model.forward(ids, state)
        logits = model.logits(hidden[-len(lens) :])
        drawn = ctx.op("greedy")(logits)
        assert (hidden.shape[0], hidden.dtype, hidden.device) == (num_tokens, torch.bfloat16, CARD)
        assert hidden.is_contiguous()
        assert logits.shape == (len(lens), source.config.vocab_size)
        assert logits.device == CARD
        assert all(x.shape[0] == len(lens) and x.device == CARD for x in tree_flatten(drawn)[0])
        kernels = set(launched)
        expected = {"prefill_kernel"} if lens is PREFILL else {"deal_kernel", "decode_kernel", "gemv"}
        assert expected | {"_act_and_mul_kernel"} <= kernels, sorted(kernels)


def on_card(value: Any) -> Any:
    """A tensor without its numbers; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CARD)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_op_gives_what_its_reference_gives_but_for_the_numbers(launched: list[str], dtype: str) -> None:
    table, _ = table_of("gfx950")
    checked = set()
    for name, definition in CATALOGUE.items():
        for entry in table.providers(name):
            for sample in definition.samples(dtype):
                reference = KernelTable().bind(name, dtype=dtype, device=TorchDevice("cpu"))
                expected = reference(*(x.clone() if isinstance(x, torch.Tensor) else x for x in sample))
                got = entry.fn(*tree_map(on_card, sample))
                ours, theirs = tree_flatten(got)[0], tree_flatten(expected)[0]
                assert [type(x) is type(None) for x in ours] == [type(x) is type(None) for x in theirs], name
                for mine, right in zip(ours, theirs, strict=True):
                    if isinstance(right, torch.Tensor):
                        assert (mine.shape, mine.device) == (right.shape, CARD), name
                        integers = not right.is_floating_point()
                        assert integers or mine.dtype == right.dtype, f"{name}: {mine.dtype}, not {right.dtype}"
                checked.add(name)
    assert len(checked) >= 14, sorted(checked)
