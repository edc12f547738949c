"""FlashAttention 3 with a stand-in for its operator: what it is given, and when it is not trusted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.ops.attention import kv_write, paged_attention
from octavo.plugin import KVView
from octavo.plugin.torch import TorchDevice
from octavo_cuda import attention
from octavo_cuda.attention import Fa3Attention

sys.path.insert(0, str(Path(__file__).parent))
from hopper import Hopper, spec

Tensor = torch.Tensor


class Operator:
    """Computes what the schema of `flash_attn_3::fwd` promises. off: a fault to plant."""

    def __init__(self, off: float = 0.0) -> None:
        self.off = off
        self.shapes: list[tuple[int, ...]] = []

    def __call__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        page_table: Tensor,
        seqused_k: Tensor,
        softmax_scale: float,
        is_causal: bool,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        assert is_causal
        assert k.shape[1:] == v.shape[1:] == (16, 2, 64), "pages are [blocks, tokens, heads, D]"
        assert k.transpose(1, 2).is_contiguous(), "pages lie as the layout says"
        assert page_table.dtype == seqused_k.dtype == torch.int32
        self.shapes.append(tuple(q.shape))
        if q.dim() == 4:
            assert cu_seqlens_q is None
            starts, rows = torch.arange(len(q) + 1, dtype=torch.int32), q[:, 0]
        else:
            assert cu_seqlens_q is not None
            assert max_seqlen_q == int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
            starts, rows = cu_seqlens_q, q
        assert window_size_right == (0 if window_size_left >= 0 else -1)
        window = window_size_left + 1 if window_size_left >= 0 else None
        result = torch.zeros_like(rows)  # also what a sequence without context gets
        for i, length in enumerate(seqused_k):
            first, last = int(starts[i]), int(starts[i + 1])
            if length > 0 and last > first:
                result[first:last] = paged_attention(
                    rows[first:last],
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    page_table[i : i + 1],
                    torch.tensor([0, last - first]),
                    length[None],
                    softmax_scale,
                    window,
                    softcap or None,
                    sinks,
                )
        last = int(starts[-1])
        out.view(rows.shape)[:last] = result[:last] + self.off


def write(k: Tensor, v: Tensor, kv: KVView, slots: Tensor) -> None:
    kv_write(k, v, kv.k, kv.v, slots)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    stand_in = Operator()
    monkeypatch.setattr(Fa3Attention, "load", staticmethod(lambda: stand_in))
    monkeypatch.setattr(attention, "load_write", lambda: write)
    return stand_in


@pytest.mark.parametrize("changes", [{}, {"window": 8}, {"softcap": 20.0}, {"sinks": True}, {"dtype": "float16"}])
def test_it_is_chosen_where_it_agrees_with_plain_attention(operator: Operator, changes: dict[str, Any]) -> None:
    kind = spec(**changes, kv_dtype=changes.get("dtype", "bfloat16"))
    assert Fa3Attention.supports(kind, Hopper()).reason == ""
    assert operator.shapes == [(5, 1, 4, 64), (48, 4, 64)], "a decode step has one query each, a mixed one is packed"


def test_it_is_not_chosen_where_it_is_wrong(operator: Operator) -> None:
    operator.off = 0.1
    assert "off by 0.1" in Fa3Attention.supports(spec(), Hopper()).reason
    operator.off = float("nan")
    assert "NaN" in Fa3Attention.supports(spec(), Hopper()).reason


def test_an_operator_that_refuses_the_kind_is_quoted(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Operator, **arguments: Any) -> None:
        raise RuntimeError("This flash attention build does not support softcap.\nsecond line")

    monkeypatch.setattr(Operator, "__call__", refuse)
    reason = Fa3Attention.supports(spec(softcap=30.0), Hopper()).reason
    assert reason == "it fails its self-test: This flash attention build does not support softcap."


def test_without_the_package_it_says_so() -> None:
    assert Fa3Attention.supports(spec(), Hopper()).reason == "it cannot be loaded: No module named 'flash_attn_3'"


def test_it_refuses_other_cards_and_formats() -> None:
    assert "not on 8.0" in Fa3Attention.supports(spec(), Hopper((8, 0))).reason
    assert "not on 0.0" in Fa3Attention.supports(spec(), TorchDevice("cpu")).reason
    assert "float32" in Fa3Attention.supports(spec(dtype="float32", kv_dtype="float32"), Hopper()).reason
    assert "float8" in Fa3Attention.supports(spec(kv_dtype="float8_e4m3fn"), Hopper()).reason
    assert "causal" in Fa3Attention.supports(spec(causal=False), Hopper()).reason
    assert "not 80" in Fa3Attention.supports(spec(head_dim=80), Hopper()).reason


def test_a_recorded_mixed_step_clears_padding_and_a_decode_step_need_not(operator: Operator) -> None:
    from octavo.plugin import BatchLimits
    from octavo.testing.conformance import paged

    kind = spec()
    layout = Fa3Attention.kv_layout(paged.kv_spec_of(kind))
    backend = Fa3Attention(kind, BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=256), Hopper())
    decode = paged.build(paged.Case(spec=kind, lens=((3, 1), (9, 1))), layout, Hopper())
    mixed = paged.build(paged.Case(spec=kind, lens=((3, 1), (0, 9))), layout, Hopper())
    assert not backend.plan(decode.batch, graph=True).clear
    assert backend.plan(mixed.batch, graph=True).clear
    assert not backend.plan(mixed.batch, graph=False).clear, "an eager step without padding has nothing to clear"
