"""The small compiled ops on every instruction set of this machine, against the catalogue's references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.ops.catalogue import CATALOGUE, reference
from octavo_cpu import native, ops_native, sampling_native

Tensor = torch.Tensor

needs_library = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")
pytestmark = needs_library

NEG_INF = float("-inf")
DTYPES = ("float32", "bfloat16")
OPS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(ops_native, name)
        for name in ("rms_norm", "add_rms_norm", "scaled_add", "act_and_mul", "join", "logits")
    },
    **{name: getattr(ops_native, name) for name in ("embedding", "embedding_part")},
    **{name: getattr(ops_native, name) for name in ("qkv_norm_rope", "qkv_norm_rope_write")},
    **{name: getattr(sampling_native, name) for name in ("begin_step", "commit_tokens", "sample", "greedy")},
    **{name: getattr(sampling_native, name) for name in ("topk_topp", "min_p")},
}


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def copies(sample: tuple[Any, ...]) -> list[Any]:
    """A sample's tensors with the same strides, in memory of their own."""
    return [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
        if isinstance(value, Tensor)
        else value
        for value in sample
    ]


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.is_floating_point():
            torch.testing.assert_close(a.float(), b.float(), atol=tolerance, rtol=tolerance)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_op_equals_its_reference_on_the_catalogue_s_samples(isa: str, name: str, dtype: str) -> None:
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for sample in CATALOGUE[name].samples(dtype):
        expected = reference(name)(*copies(sample))
        assert_close(OPS[name](*copies(sample)), expected, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 33, 576])
def test_norms_of_any_width_equal_float32_ones(isa: str, width: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for rows in (0, 1, 3, 130):
        x, residual = gaussian(rows, width, seed=1, dtype=kind), gaussian(rows, width, seed=2, dtype=kind)
        for weight in (gaussian(width, seed=3, dtype=kind), 1 + gaussian(width, seed=3)):
            expected = reference("add_rms_norm")(x.clone(), residual.clone(), weight, 1e-6)
            assert_close(ops_native.rms_norm(x, weight, 1e-6), reference("rms_norm")(x, weight, 1e-6), 1e-2)
            assert_close(ops_native.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6), expected, 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 32), (24, 24), (40, 36), (128, 128)])
@pytest.mark.parametrize("norm", ["none", "head", "row"])
def test_heads_of_any_size_are_normed_rotated_and_written(
    isa: str, norm: str, dim: int, rotated: int, dtype: str
) -> None:
    kind, heads, kv_heads, block = getattr(torch, dtype), 5, 2, 8
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    angles = gaussian(50, rotated // 2, seed=9)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(kind)
    widths = {"none": (None, None), "head": (dim, dim), "row": (heads * dim, kv_heads * dim)}[norm]
    weights = [None if n is None else 1 + gaussian(n, seed=4) / 10 for n in widths]
    for tokens in (0, 1, 40):
        packed = gaussian(tokens, (heads + 2 * kv_heads) * dim, seed=tokens, dtype=kind)
        positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1))
        slots = torch.randperm(48, generator=torch.Generator().manual_seed(2))[:tokens]
        for cos_sin in (table, None):
            args = (positions, cos_sin, *weights, 1e-6, heads, kv_heads)
            assert_close(
                ops_native.qkv_norm_rope(packed.clone(), *args),
                reference("qkv_norm_rope")(packed.clone(), *args),
                tolerance,
            )
            for order in ((6, kv_heads, block, dim), (6, block, kv_heads, dim)):
                caches = [torch.zeros(order, dtype=kind) for _ in range(4)]
                if order[1] == block:
                    caches = [cache.transpose(1, 2) for cache in caches]
                scales = (torch.tensor([0.5, 2.0]), 4.0)
                found = ops_native.qkv_norm_rope_write(packed.clone(), *args, *caches[:2], slots, *scales)
                expected = reference("qkv_norm_rope_write")(packed.clone(), *args, *caches[2:], slots, *scales)
                assert_close(found, expected, tolerance)


def test_every_float8_number_and_what_lies_between_is_written_as_torch_rounds_it(isa: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[codes.isfinite()].sort().values
    between = torch.cat((exact, (exact[1:] + exact[:-1]) / 2, torch.linspace(-600, 600, 1001), exact * 1.01))
    values = torch.nn.functional.pad(between, (0, -len(between) % 16)).view(-1, 1, 16)
    qkv = torch.cat((values, values, values), dim=1).flatten(1)
    caches = [torch.zeros(len(values), 1, 1, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.arange(len(values))
    ops_native.qkv_norm_rope_write(qkv, slots, None, None, None, 1e-6, 1, 1, *caches, slots)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    for cache in caches:
        assert torch.equal(cache.view(torch.uint8).flatten(), expected.view(torch.uint8).flatten())


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_any_width(isa: str, dtype: str, kind: str) -> None:
    for rows, width in ((1, 1), (3, 17), (70, 1536)):
        x = gaussian(rows, 2 * width, seed=width, dtype=getattr(torch, dtype)) * 3
        tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
        assert_close(ops_native.act_and_mul(x, kind), reference("act_and_mul")(x, kind), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_table_and_nothing_behind_it(isa: str, dtype: str) -> None:
    table = gaussian(10, 37, seed=1, dtype=getattr(torch, dtype))
    ids = torch.tensor([9, 0, 3, 3])
    assert torch.equal(ops_native.embedding(ids, table), table[ids])
    assert_close(ops_native.embedding(ids.int(), table, 3.3), reference("embedding")(ids, table, 3.3), 1e-6)
    assert (ops_native.embedding(torch.tensor([-1, 10]), table) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_any_size_are_rounded_once(isa: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for rows, width in ((0, 5), (1, 1), (3, 15), (7, 33), (130, 576)):
        for scale in (None, 0.22, -3.0):
            x, residual = gaussian(rows, width, seed=1, dtype=kind), gaussian(rows, width, seed=2, dtype=kind)
            exact = residual.double() + x.double() * (1.0 if scale is None else scale)
            found = ops_native.scaled_add(x, residual.clone(), scale)
            torch.testing.assert_close(found, exact.to(kind), rtol=2**-8 if dtype == "bfloat16" else 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_choice_over_several_chunks_is_the_reference_s(isa: str, dtype: str) -> None:
    for vocab, spread in ((5, 1.0), (16384, 0.0), (49153, 3.0), (40000, 0.01), (33000, 30.0)):
        n = 9
        logits = (gaussian(n, vocab, seed=vocab) * spread).to(getattr(torch, dtype))
        rows = torch.arange(n).flip(0)
        temperature, seeds = torch.linspace(0, 1.6, n), torch.arange(n) * 7919 - 3
        positions = torch.arange(n) + 5
        expected = reference("sample")(logits, temperature, seeds, positions, rows)
        assert torch.equal(sampling_native.sample(logits, temperature, seeds, positions, rows), expected)
        assert torch.equal(sampling_native.greedy(logits), reference("greedy")(logits))


def test_rows_without_a_likeliest_token_choose_none(isa: str) -> None:
    for vocab, place in ((40, 39), (20_000, 3), (20_000, 19_990)):
        logits = gaussian(5, vocab, seed=1)
        logits[0, place], logits[1, place], logits[2] = float("nan"), float("inf"), NEG_INF
        logits[3], logits[3, place] = NEG_INF, -1.0
        assert sampling_native.greedy(logits).tolist()[:4] == [-1, -1, -1, place]
        seeds = torch.arange(5)
        drawn = sampling_native.sample(logits, torch.ones(5), seeds, seeds).tolist()
        assert drawn[:4] == [-1, -1, -1, place]
        assert drawn[4] >= 0


def test_rows_of_a_wider_tensor_are_read_by_their_stride(isa: str) -> None:
    wide = gaussian(6, 100, seed=1)
    assert torch.equal(sampling_native.greedy(wide[::2, 10:60]), wide[::2, 10:60].argmax(-1))


@pytest.mark.parametrize("seed", range(6))
def test_border_is_where_a_sort_puts_it(isa: str, seed: int) -> None:
    """Many equal logits, so that ties lie on the border; probabilities that no float addition reorders."""
    generator = torch.Generator().manual_seed(seed)
    vocab = (7, 300, 5000, 49152, 2048, 33)[seed]
    n = 12
    logits = torch.randn(n, vocab, generator=generator) * 3
    logits[::2] = logits[::2].round()
    logits[3] = 0.0
    logits[4, : vocab // 2] = NEG_INF
    top_k = torch.tensor([0, 1, 2, 5, 3, vocab, vocab + 9, 4, 0, 50, 6, 17])
    top_p = torch.tensor([0.91, 1.0, 0.5, 0.33, 0.999, 0.0, 0.123, 1.0, 0.05, 0.77, 1.0, 0.6])
    found = sampling_native.topk_topp(logits.clone(), top_k, top_p)
    expected = reference("topk_topp")(logits.clone(), top_k, top_p)
    kept, wanted = (found > NEG_INF).sum(-1), (expected > NEG_INF).sum(-1)
    # A cumulative sum in float32 may put the border one token off among thousands.
    assert ((kept - wanted).abs() <= (wanted > 1000)).all()
    same = kept == wanted
    assert torch.equal(found[same], expected[same])
    assert same[top_p == 1.0].all()


def test_min_p_removes_what_is_less_likely_than_its_share_of_the_best(isa: str) -> None:
    logits = gaussian(4, 1001, seed=1) * 4
    threshold = torch.tensor([0.0, 0.1, 0.5, 1.0])
    assert torch.equal(sampling_native.min_p(logits.clone(), threshold), reference("min_p")(logits.clone(), threshold))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_normed_as_they_stand(isa: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    weight, tolerance = gaussian(24, seed=1, dtype=kind), {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    wide = gaussian(6, 100, seed=2, dtype=kind)
    heads = gaussian(6, 5, 32, seed=3, dtype=kind)
    for x in (wide[:, 7:31], heads[:, 1:4, 3:27], heads[:, :, :24].transpose(0, 1), wide.t()[:48:2, :24].t()[:, :24]):
        assert_close(ops_native.rms_norm(x, weight, 1e-6), reference("rms_norm")(x, weight, 1e-6), tolerance)
    residual = gaussian(6, 24, seed=4, dtype=kind)
    found = ops_native.add_rms_norm(wide[:, 7:31], residual.clone(), weight, 1e-6)
    assert_close(found, reference("add_rms_norm")(wide[:, 7:31].clone(), residual.clone(), weight, 1e-6), tolerance)


def test_strided_projection_and_caches_that_lie_differently(isa: str) -> None:
    packed = gaussian(9, 2 * (3 + 2) * 16, seed=1)[:, ::2]
    assert not packed.is_contiguous()
    positions, slots = torch.arange(9), torch.arange(9) + 2
    angles = gaussian(9, 8, seed=2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def caches() -> tuple[Tensor, Tensor]:
        return torch.zeros(3, 1, 4, 16), torch.zeros(3, 4, 2, 16).transpose(1, 2)[:, 1:]

    args = (positions, table, None, None, 1e-6, 3, 1)
    found = ops_native.qkv_norm_rope_write(packed, *args, *caches(), slots)
    assert_close(found, reference("qkv_norm_rope_write")(packed.clone(), *args, *caches(), slots), 1e-5)
    assert_close(ops_native.qkv_norm_rope(packed, *args), reference("qkv_norm_rope")(packed.clone(), *args), 1e-5)


def test_filters_leave_what_lies_between_rows(isa: str) -> None:
    top_k, top_p = torch.tensor([3, 0, 5, 0]), torch.tensor([1.0, 0.4, 0.6, 1.0])
    for name, args in (("topk_topp", (top_k, top_p)), ("min_p", (torch.tensor([0.3, 0.0, 0.8, 0.1]),))):
        wide = gaussian(4, 60, seed=1)
        before, rows = wide.clone(), wide[:, 5:42]
        expected = reference(name)(rows.clone(), *args)
        assert torch.equal(getattr(sampling_native, name)(rows, *args), expected)
        assert torch.equal(wide[:, :5], before[:, :5])
        assert torch.equal(wide[:, 42:], before[:, 42:])


def test_draws_from_many_rows_and_seeds_are_the_reference_s(isa: str) -> None:
    """Flat rows, where noise alone decides and its rare large values do; seeds of more than 32 bits."""
    n = 150
    logits = gaussian(n, 6000, seed=1) * 0.01
    seeds = torch.arange(n) * ((1 << 33) + 12345) - (1 << 40)
    seeds[1] = seeds[0] + (1 << 32)
    for temperature in (torch.full((n,), 1.0), torch.full((n,), 1e-3)):
        args = (logits, temperature, seeds, torch.arange(n))
        assert torch.equal(sampling_native.sample(*args), reference("sample")(*args))
    twice = logits[:1].expand(2, -1).contiguous()
    drawn = sampling_native.sample(twice, torch.ones(2), seeds[:2], torch.zeros(2, dtype=torch.int64))
    assert drawn[0] != drawn[1], "seeds that differ in their upper half only"


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gates_of_extreme_numbers_are_those_of_torch(isa: str, kind: str) -> None:
    extreme = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 12.0, -12.0, 87.0, -87.0, 100.0, -100.0, 1e4, -1e4, 1e30, -1e30])
    x = torch.stack((extreme, torch.ones_like(extreme)), dim=0).flatten()[None]
    assert_close(ops_native.act_and_mul(x, kind), reference("act_and_mul")(x, kind), 1e-5)


def test_table_of_angles_in_another_dtype_than_the_heads(isa: str) -> None:
    angles = gaussian(9, 8, seed=2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    for kind, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        packed = gaussian(9, 5 * 16, seed=1, dtype=kind)
        args = (torch.arange(9), table.to(other), None, None, 1e-6, 3, 1)
        expected = reference("qkv_norm_rope")(packed.clone(), *args)
        assert_close(ops_native.qkv_norm_rope(packed.clone(), *args), expected, 3e-2)
