"""A vocabulary that serves both ends of a model: rows are read out of the weight that its head has packed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.layers.embedding import VocabEmbedding
from octavo.ops.catalogue import reference
from octavo.plugin import LinearSpec
from octavo.plugin.torch import core_scheme
from octavo.testing.tiny import make_model
from octavo_cpu import native
from octavo_cpu.device import CpuDevice
from octavo_cpu.linear_native import DTYPES, GgufLinear, PlainLinear

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")

DEVICE = CpuDevice(num_threads=1)


def spec_of(n: int, k: int, dtype: str, kind: str | None = None) -> LinearSpec:
    scheme = None if kind is None else core_scheme(f"gguf:{kind}")
    return LinearSpec(in_features=k, out_features=n, act_dtype=dtype, out_dtype=dtype, scheme=scheme)


def random_blocks(kind: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of every code and sane scales, and the float32 weight that the `gguf` package reads from them."""
    qtype = gguf.GGMLQuantizationType[kind]
    columns, size = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(n + k)
    blocks = rng.integers(0, 256, (n, k // columns, size), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(kind, (0,)):
        numbers = (0.5 + rng.random((n, k // columns, 1))) * 0.01
        blocks[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    rows = blocks.reshape(n, -1)
    return torch.from_numpy(rows), torch.from_numpy(gguf.dequantize(rows, qtype))


def assert_looks_up(found_by: object, packed: object, table: torch.Tensor) -> None:
    """All rows in an order of their own, rows of a later rank, ids that lie elsewhere, none, and a factor."""
    n = len(table)
    ids = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    look_up = found_by.look_up  # type: ignore[attr-defined]
    assert torch.equal(look_up(packed, ids, 0, None), table[ids])
    assert torch.equal(look_up(packed, ids.int() + 70, 70, None), table[ids])
    outside = torch.tensor([69, 70, 70 + n, -1])
    expected = torch.cat((table[:1] * 0, table[:1], table[:1] * 0, table[:1] * 0))
    assert torch.equal(look_up(packed, outside, 70, None), expected)
    assert look_up(packed, ids[:0], 0, None).shape == (0, table.shape[1])
    scaled = reference("embedding")(ids, table, 5.3)
    assert torch.equal(look_up(packed, ids, 0, 5.3), scaled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_plain_numbers_come_back_bit_by_bit(isa: str, dtype: str) -> None:
    for n, k in ((1, 1), (33, 31), (96, 64), (50, 200)):
        table = torch.randn(n, k, generator=torch.Generator().manual_seed(k)).to(getattr(torch, dtype))
        kernel, spec = PlainLinear(), spec_of(n, k, dtype)
        assert_looks_up(kernel, kernel.prepare({"weight": table}, spec, DEVICE), table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", native.BLOCKS)
def test_rows_of_blocks_are_what_gguf_reads_rounded_once(isa: str, kind: str, dtype: str) -> None:
    for n, k in ((1, 256), (17, 256), (100, 512)):
        rows, weight = random_blocks(kind, n, k)
        kernel, spec = GgufLinear(), spec_of(n, k, dtype, kind)
        assert_looks_up(kernel, kernel.prepare({"weight": rows}, spec, DEVICE), weight.to(getattr(torch, dtype)))


def test_bytes_quantized_at_load_are_not_looked_up() -> None:
    from octavo_cpu.linear_native import Int4GroupsLinear, Int8Linear

    assert not hasattr(Int8Linear, "look_up")
    assert not hasattr(Int4GroupsLinear, "look_up")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tied_vocabulary_is_kept_once_and_gives_the_same_tokens(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False, tie_word_embeddings=True))
    tables: list[int] = []
    load = VocabEmbedding._load

    def noted(self: VocabEmbedding, tensor: object) -> None:
        load(self, tensor)  # type: ignore[arg-type]
        tables.append(self.table.numel())

    monkeypatch.setattr(VocabEmbedding, "_load", noted)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = []
    for twice in (False, True):
        with monkeypatch.context() as patch:
            if twice:
                patch.delattr(PlainLinear, "look_up")
            settings = {"max_model_len": 64, "num_kv_blocks": 32, "skip_tokenizer_init": True}
            with LLM(model, platform="cpu", dtype=dtype, **settings) as llm:
                answers.append([o.outputs[0].token_ids for o in llm.generate([[3, 4, 5], [9] * 20], params)])
    assert answers[0] == answers[1]
    assert tables[0] == 0 < tables[1]
