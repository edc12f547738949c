"""Norm, embedding with its head, MLP."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import UnsupportedModelError
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm

VOCAB, HIDDEN = 40, 64


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_unit_offset_adds_one_in_float32(make_context, tensors):
    ctx = make_context(dtype=torch.bfloat16)
    norm = RMSNorm(ctx, "norm", 8, 1e-6, unit_offset=True)
    stored = torch.full((8,), 2.0**-10).bfloat16()
    ctx.weights.slots["norm.weight"].load(tensors.plain("norm.weight", stored))
    assert norm.weight.dtype == torch.float32
    assert norm.weight.eq(1 + 2.0**-10).all(), "bfloat16 would have rounded this to one"


def test_a_plain_norm_weight_takes_the_dtype_of_the_model(make_context, tensors):
    ctx = make_context(dtype=torch.bfloat16)
    norm = RMSNorm(ctx, "norm", 8, 1e-6)
    ctx.weights.slots["norm.weight"].load(tensors.plain("norm.weight", torch.rand(8)))
    assert norm.weight.dtype == torch.bfloat16


def test_a_tied_plain_head_shares_the_storage_of_the_embedding(make_context, tensors):
    ctx = make_context()
    embed = VocabEmbedding(ctx, "embed", VOCAB, HIDDEN)
    head = LMHead(ctx, "lm_head", VOCAB, HIDDEN, tied_to=embed)
    table = torch.randn(VOCAB, HIDDEN)
    ctx.weights.slots["embed.weight"].load(tensors.plain("embed.weight", table))
    assert head._packed.weight.data_ptr() == embed.table.data_ptr()
    hidden = torch.randn(3, HIDDEN)
    torch.testing.assert_close(head(hidden), hidden @ table.T)
    assert "lm_head.weight" not in ctx.weights.slots


def test_a_tied_quantized_head_gets_the_packed_rows_and_lookups_the_plain_ones(make_context, tensors):
    ctx = make_context(gguf={"embed": "Q8_0"})
    embed = VocabEmbedding(ctx, "embed", VOCAB, HIDDEN)
    head = LMHead(ctx, "lm_head", VOCAB, HIDDEN, tied_to=embed)
    tensor = tensors.packed("embed.weight", torch.randn(VOCAB, HIDDEN), "Q8_0")
    ctx.weights.slots["embed.weight"].load(tensor)
    assert [choice.context for choice in ctx.kernels.choices if choice.what == "linear"] == ["40x64 gguf:Q8_0"]
    ids = torch.tensor([3, 0, 39])
    torch.testing.assert_close(embed(ids), tensors.unpacked(tensor)[ids])
    hidden = torch.randn(2, HIDDEN)
    torch.testing.assert_close(head(hidden), hidden @ tensors.unpacked(tensor).T, atol=1e-4, rtol=1e-4)


def test_an_untied_head_has_its_own_slot_and_caps_its_logits(make_context, tensors):
    ctx = make_context()
    head = LMHead(ctx, "lm_head", VOCAB, HIDDEN, scale=0.5, softcap=3.0)
    weight = torch.randn(VOCAB, HIDDEN)
    ctx.weights.slots["lm_head.weight"].load(tensors.plain("lm_head.weight", weight))
    hidden = torch.randn(3, HIDDEN)
    torch.testing.assert_close(head(hidden), 3.0 * torch.tanh(hidden @ weight.T * 0.5 / 3.0))


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.bfloat16), ({"softcap": 3.0}, torch.float32)])
def test_logits_are_copied_to_float32_only_to_change_them(options, dtype, make_context, tensors):
    ctx = make_context(dtype=torch.bfloat16)
    head = LMHead(ctx, "lm_head", VOCAB, HIDDEN, **options)
    ctx.weights.slots["lm_head.weight"].load(tensors.plain("lm_head.weight", torch.randn(VOCAB, HIDDEN)))
    assert head(torch.randn(1, HIDDEN).bfloat16()).dtype == dtype


@pytest.mark.parametrize(("name", "function"), [("silu", F.silu), ("gelu", F.gelu)])
@pytest.mark.parametrize("fused", [False, True])
def test_mlp_gates_with_the_activation_of_the_config(name, function, fused, make_context, tensors):
    ctx = make_context()
    mlp = GatedMLP(ctx, "mlp", HIDDEN, 32, activation=name, fused=fused)
    gate, up, down = torch.randn(32, HIDDEN), torch.randn(32, HIDDEN), torch.randn(HIDDEN, 32)
    given = {"gate_up_proj": torch.cat((gate, up))} if fused else {"gate_proj": gate, "up_proj": up}
    for module, weight in (given | {"down_proj": down}).items():
        ctx.weights.slots[f"mlp.{module}.weight"].load(tensors.plain(f"mlp.{module}.weight", weight))
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(mlp(x), (function(x @ gate.T) * (x @ up.T)) @ down.T, atol=1e-3, rtol=1e-4)


def test_mlp_gates_also_where_gate_and_up_come_in_two_formats(make_context, tensors):
    ctx = make_context(gguf={"mlp.gate_proj": "Q4_0", "mlp.up_proj": "Q8_0", "mlp.down_proj": "Q8_0"})
    mlp = GatedMLP(ctx, "mlp", HIDDEN, 32, activation="silu")
    gate, up, down = (
        tensors.packed(f"mlp.{name}_proj.weight", torch.randn(n, k), fmt)
        for name, n, k, fmt in (("gate", 32, HIDDEN, "Q4_0"), ("up", 32, HIDDEN, "Q8_0"), ("down", HIDDEN, 32, "Q8_0"))
    )
    for tensor in (gate, up, down):
        ctx.weights.slots[tensor.name].load(tensor)
    x = torch.randn(3, HIDDEN)
    gates, ups = (x @ tensors.unpacked(t).T for t in (gate, up))
    torch.testing.assert_close(mlp(x), (F.silu(gates) * ups) @ tensors.unpacked(down).T, atol=1e-3, rtol=1e-4)


def test_an_unknown_activation_is_refused_by_layer_and_name(make_context):
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0.mlp: activation 'relu2'"):
        GatedMLP(make_context(), "model.layers.0.mlp", HIDDEN, 32, activation="relu2")
