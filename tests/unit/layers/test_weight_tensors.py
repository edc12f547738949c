"""A weight of several tensors: each is cut to the rank's share, joined with its neighbours', and named if unfit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import CheckpointError, ConfigError, UnsupportedModelError
from octavo.layers.embedding import LMHead, VocabEmbedding
from octavo.layers.linear import Linear, RowLinear, Shard
from octavo.plugin import Along, MatrixSpec, QuantLayer, QuantScheme, QuantTensor

Tensor = torch.Tensor
GROUP = 16


class Rank:
    """A communicator that only says who it is."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, t: Tensor) -> Tensor:
        return t

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        return t


def decode(weights: Mapping[str, Tensor], scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """codes int8 [K, N] (transposed), scale [N, K / 16], bump [1]."""
    codes = weights["codes"].T.float()
    scale = weights["scale"].repeat_interleave(GROUP, 1)[:, : codes.shape[1]]
    return (codes * scale + weights["bump"]).to(dtype)


SCHEME = QuantScheme(weight="int8", group=(1, GROUP), packing="test:16", dequantize=decode)


def keep(spec: MatrixSpec) -> QuantLayer:
    """How the tests' checkpoint keeps a matrix."""
    n, k = spec.out_features, spec.in_features
    return QuantLayer(
        scheme=SCHEME,
        tensors={
            "codes": QuantTensor(shape=(k, n), dtype="int8", rows=Along(dim=1), columns=Along(dim=0)),
            "scale": QuantTensor(
                shape=(n, -(-k // GROUP)), dtype="float32", rows=Along(dim=0), columns=Along(dim=1, features=GROUP)
            ),
            "bump": QuantTensor(shape=(1,), dtype="float32"),
        },
        unused=("shape",),
    )


def made(n: int, k: int, *, bump: float = 0.0) -> dict[str, Tensor]:
    """The tensors of a matrix [n, k]; scales in half precision, as checkpoints have them."""
    return {
        "codes": torch.randint(-8, 8, (k, n), dtype=torch.int8),
        "scale": torch.rand(n, -(-k // GROUP)).half(),
        "bump": torch.tensor([bump]),
    }


def numbers(tensors: Mapping[str, Tensor]) -> Tensor:
    return decode(tensors, SCHEME, torch.float32)


@pytest.fixture
def fill(tensors: Any) -> Any:
    def fill(ctx: Any, name: str, given: Mapping[str, Tensor]) -> None:
        for suffix, data in given.items():
            full = f"{name}.{suffix}"
            assert ctx.weights.slots[full].shape == tuple(data.shape)
            ctx.weights.slots[full].load(tensors.plain(full, data))

    return fill


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def linear(ctx: Any, sizes: list[int], k: int, **options: Any) -> Linear:
    shards = [Shard(name=f"m.{i}", out_features=n, keep=((0, n),)) for i, n in enumerate(sizes)]
    return Linear(ctx, shards, k, **options)


def test_neighbours_are_joined_tensor_by_tensor(make_context: Any, fill: Any) -> None:
    ctx = make_context(quant=keep)
    layer, x = linear(ctx, [5, 3], 40), torch.randn(2, 40)
    given = [made(5, 40), made(3, 40)]
    for i, tensors in enumerate(given):
        fill(ctx, f"m.{i}", tensors)
    assert [choice.context for choice in ctx.kernels.choices] == ["8x40 test:16"]
    torch.testing.assert_close(layer(x), torch.cat([F.linear(x, numbers(t)) for t in given], 1))


def test_neighbours_that_differ_in_a_tensor_that_has_no_rows_stay_apart(make_context: Any, fill: Any) -> None:
    ctx = make_context(quant=keep)
    layer, x = linear(ctx, [4, 4, 4], 32), torch.randn(2, 32)
    given = [made(4, 32, bump=bump) for bump in (0.5, 0.25, 0.25)]
    for i, tensors in enumerate(given):
        fill(ctx, f"m.{i}", tensors)
    assert [choice.context for choice in ctx.kernels.choices if choice.what == "linear"] == [
        "4x32 test:16",
        "8x32 test:16",
    ]
    torch.testing.assert_close(layer(x), torch.cat([F.linear(x, numbers(t)) for t in given], 1))


def test_ranks_that_share_rows_get_theirs_of_every_tensor(make_context: Any, fill: Any) -> None:
    given, x = made(12, 32, bump=0.5), torch.randn(2, 32)
    ctx = make_context(quant=keep)
    layer = Linear(ctx, [Shard(name="m", out_features=12, keep=((2, 2), (8, 3)))], 32)
    fill(ctx, "m", given)
    torch.testing.assert_close(layer(x), F.linear(x, numbers(given)[[2, 3, 8, 9, 10]]))


@pytest.mark.parametrize("k", [64, 32])
def test_ranks_that_share_columns_add_up_to_the_whole(make_context: Any, fill: Any, k: int) -> None:
    given, x, total = made(6, k), torch.randn(3, k), torch.zeros(3, 6)
    for rank in range(2):
        ctx = make_context(quant=keep, comm=Rank(rank, 2))
        layer = RowLinear(ctx, "m", k, 6)
        fill(ctx, "m", given)
        total += layer(x[:, rank * k // 2 : (rank + 1) * k // 2])
    torch.testing.assert_close(total, F.linear(x, numbers(given)), atol=1e-4, rtol=1e-4)


def test_a_cut_within_a_group_is_refused_before_anything_is_read(make_context: Any) -> None:
    with pytest.raises(ConfigError, match=r"m\.scale at input feature 24 cannot be cut: 16 features are packed"):
        RowLinear(make_context(quant=keep, comm=Rank(0, 2)), "m", 48, 6)


def test_a_cut_within_a_gguf_block_is_refused_too(make_context: Any) -> None:
    with pytest.raises(ConfigError, match=r"m\.weight at input feature 48 cannot be cut: 32 features"):
        RowLinear(make_context(gguf={"m": "Q4_0"}, comm=Rank(1, 2)), "m", 96, 6)


def test_a_tied_vocabulary_of_several_tensors_serves_both_ends_of_every_rank(make_context: Any, fill: Any) -> None:
    given, hidden, ids = made(7, 32), torch.randn(2, 32), torch.tensor([0, 3, 6])
    logits, vectors = [], torch.zeros(3, 32)
    for rank in range(2):
        ctx = make_context(quant=keep, comm=Rank(rank, 2))
        embed = VocabEmbedding(ctx, "embed", 7, 32)
        head = LMHead(ctx, "head", 7, 32, tied_to=embed)
        fill(ctx, "embed", given)
        vectors += embed(ids)
        logits.append(head._kernel.apply(hidden, head._packed, None))
    torch.testing.assert_close(vectors, numbers(given)[ids])
    torch.testing.assert_close(torch.cat(logits, 1)[:, :7], F.linear(hidden, numbers(given)))


def test_dequantize_unpacks_every_matrix_when_it_is_complete(make_context: Any, fill: Any) -> None:
    ctx = make_context(quant=keep, dequantize=True)
    layer, x = linear(ctx, [4, 4], 32), torch.randn(2, 32)
    given = [made(4, 32, bump=bump) for bump in (0.5, 0.25)]
    for i, tensors in enumerate(given):
        fill(ctx, f"m.{i}", tensors)
    assert [choice.context for choice in ctx.kernels.choices] == ["8x32 float32"]
    torch.testing.assert_close(layer(x), torch.cat([F.linear(x, numbers(t)) for t in given], 1))


def test_what_the_format_does_not_need_is_known_to_be_surplus(make_context: Any) -> None:
    ctx = make_context(quant=keep)
    linear(ctx, [4], 32)
    assert ctx.weights.ignored == [r"m\.0\.shape"]


def test_a_tensor_of_another_kind_of_number_is_named(make_context: Any, tensors: Any) -> None:
    ctx = make_context(quant=keep)
    linear(ctx, [4], 32)
    with pytest.raises(CheckpointError, match=r"memory: m\.0\.codes holds torch\.float32, its format says torch\.int8"):
        ctx.weights.slots["m.0.codes"].load(tensors.plain("m.0.codes", torch.zeros(32, 4)))
    ctx = make_context()
    linear(ctx, [4], 32)
    with pytest.raises(CheckpointError, match=r"m\.0\.weight holds torch\.int8"):
        ctx.weights.slots["m.0.weight"].load(tensors.plain("m.0.weight", torch.zeros(4, 32, dtype=torch.int8)))


def test_a_dequantize_that_gives_another_shape_is_named(make_context: Any, fill: Any) -> None:
    scheme = QuantScheme(weight="int8", packing="odd", dequantize=lambda w, scheme, dtype: w["codes"].to(dtype))
    tensors = {"codes": QuantTensor(shape=(3, 4), dtype="int8", rows=Along(dim=1), columns=Along(dim=0))}
    ctx = make_context(quant=lambda spec: QuantLayer(scheme=scheme, tensors=tensors), dequantize=True)
    linear(ctx, [4], 3)
    with pytest.raises(UnsupportedModelError, match=r"`dequantize` of 'odd' gives \[3, 4\] for a weight of \[4, 3\]"):
        fill(ctx, "m.0", {"codes": torch.zeros(3, 4, dtype=torch.int8)})
