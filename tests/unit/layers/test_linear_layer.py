from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.layers.linear import Linear, RowLinear, Shard, share

HIDDEN = 64


class Rank:
    """A communicator that only says who it is."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        return t


def shards(*sizes: int) -> list[Shard]:
    return [Shard(name=f"layer.{i}", out_features=n, keep=((0, n),)) for i, n in enumerate(sizes)]


def named(kinds: tuple[str, ...]) -> dict[str, str]:
    return {f"layer.{i}": kind for i, kind in enumerate(kinds)}


def fill(ctx, *given) -> None:
    for tensor in given:
        ctx.weights.slots[tensor.name].load(tensor)


def calls_of(layer: Linear) -> int:
    return len(layer._parts)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, HIDDEN)


def test_shards_of_one_format_become_one_matrix_multiplication(make_context, tensors, x):
    ctx = make_context()
    layer = Linear(ctx, shards(32, 16), HIDDEN)
    a, b = torch.randn(32, HIDDEN), torch.randn(16, HIDDEN)
    fill(ctx, tensors.plain("layer.1.weight", b), tensors.plain("layer.0.weight", a))
    assert calls_of(layer) == 1
    torch.testing.assert_close(layer(x), torch.cat((F.linear(x, a), F.linear(x, b)), dim=1))


def test_neighbours_of_one_format_merge_and_another_format_stays_apart(make_context, tensors, x):
    kinds = ("Q4_0", "Q4_0", "Q8_0")
    ctx = make_context(gguf=named(kinds))
    layer = Linear(ctx, shards(32, 16, 16), HIDDEN)
    given = [
        tensors.packed(f"layer.{i}.weight", torch.randn(n, HIDDEN), kind)
        for i, (n, kind) in enumerate(zip((32, 16, 16), kinds, strict=True))
    ]
    fill(ctx, *given)
    assert calls_of(layer) == 2
    want = torch.cat([F.linear(x, tensors.unpacked(t)) for t in given], dim=1)
    torch.testing.assert_close(layer(x), want, atol=1e-4, rtol=1e-4)


def test_packed_shards_that_alternate_keep_the_order_of_their_rows(make_context, tensors, x):
    kinds = ("Q4_1", "Q8_0", "Q4_1")
    ctx = make_context(gguf=named(kinds))
    layer = Linear(ctx, shards(16, 16, 16), HIDDEN, bias=True)
    given = [tensors.packed(f"layer.{i}.weight", torch.randn(16, HIDDEN), kind) for i, kind in enumerate(kinds)]
    biases = [torch.randn(16) for _ in given]
    fill(ctx, *given, *[tensors.plain(f"layer.{i}.bias", b) for i, b in enumerate(biases)])
    assert calls_of(layer) == 3
    want = torch.cat([F.linear(x, tensors.unpacked(t), b) for t, b in zip(given, biases, strict=True)], dim=1)
    torch.testing.assert_close(layer(x), want, atol=1e-4, rtol=1e-4)


def test_dequantize_turns_every_format_into_one_plain_weight(make_context, tensors, x):
    kinds = ("Q4_0", "Q8_0")
    ctx = make_context(gguf=named(kinds), dequantize=True)
    layer = Linear(ctx, shards(16, 16), HIDDEN)
    given = [tensors.packed(f"layer.{i}.weight", torch.randn(16, HIDDEN), kind) for i, kind in enumerate(kinds)]
    fill(ctx, *given)
    assert calls_of(layer) == 1
    assert [choice.context for choice in ctx.kernels.choices] == ["32x64 float32"]
    torch.testing.assert_close(layer(x), torch.cat([F.linear(x, tensors.unpacked(t)) for t in given], dim=1))


def test_a_layer_packs_with_its_last_tensor_and_drops_the_raw_ones(make_context, tensors):
    ctx = make_context()
    layer = Linear(ctx, shards(8, 8), HIDDEN)
    fill(ctx, tensors.plain("layer.0.weight", torch.randn(8, HIDDEN)))
    assert calls_of(layer) == 0
    fill(ctx, tensors.plain("layer.1.weight", torch.randn(8, HIDDEN)))
    assert calls_of(layer) == 1
    assert not layer._raw


def test_weights_are_copies_so_that_the_file_may_close(make_context, tensors, x):
    ctx = make_context()
    layer = Linear(ctx, shards(8), HIDDEN)
    weight = torch.randn(8, HIDDEN)
    fill(ctx, tensors.plain("layer.0.weight", weight))
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


def test_plain_weights_take_the_dtype_of_the_model(make_context, tensors, x):
    ctx = make_context(dtype=torch.bfloat16)
    layer = Linear(ctx, shards(8), HIDDEN, bias=True)
    fill(ctx, tensors.plain("layer.0.weight", torch.randn(8, HIDDEN)), tensors.plain("layer.0.bias", torch.randn(8)))
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_a_rank_keeps_its_ranges_of_a_fused_tensor_in_order(make_context, tensors, x):
    ctx = make_context()
    fused = [Shard(name="layer.0", out_features=24, keep=((4, 4), (16, 2), (22, 2)))]
    layer = Linear(ctx, fused, HIDDEN, bias=True)
    weight, bias = torch.randn(24, HIDDEN), torch.randn(24)
    fill(ctx, tensors.plain("layer.0.weight", weight), tensors.plain("layer.0.bias", bias))
    kept = [4, 5, 6, 7, 16, 17, 22, 23]
    torch.testing.assert_close(layer(x), F.linear(x, weight[kept], bias[kept]))
    assert ctx.weights.slots["layer.0.weight"].shape == (24, HIDDEN)


def test_parts_of_a_row_linear_add_up_with_one_bias(make_context, tensors, x):
    weight, bias = torch.randn(8, HIDDEN), torch.randn(8)
    parts = []
    for rank in range(2):
        ctx = make_context(comm=Rank(rank, 2))
        layer = RowLinear(ctx, "layer", HIDDEN, 8, bias=True)
        fill(ctx, tensors.plain("layer.weight", weight), tensors.plain("layer.bias", bias))
        parts.append(layer(x[:, rank * 32 : rank * 32 + 32]))
    torch.testing.assert_close(parts[0] + parts[1], F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_a_share_that_does_not_come_out_even_names_what_and_how_much():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 does not divide intermediate_size \(10\)"):
        share(10, Rank(0, 3), "intermediate_size")
