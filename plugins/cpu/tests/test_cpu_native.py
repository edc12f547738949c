"""The compiled kernels, on every instruction set of this machine: exact for what they round, near for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.plugin import LinearSpec
from octavo.plugin.torch import core_scheme, dequantize_weight, quantize_rows
from octavo.quant.online import SCHEMES
from octavo_cpu import native
from octavo_cpu.device import CpuDevice
from octavo_cpu.linear_native import (
    DTYPES,
    GgufLinear,
    Int4GroupsLinear,
    Int8Linear,
    PlainLinear,
    WeightMemory,
    matmul,
    pack,
)

BLOCKS = tuple(native.BLOCKS)
ROUNDING = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}
"""A share of the largest output: the order of sums, and the rounding of what is stored."""

needs_library = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")
DEVICE = CpuDevice(num_threads=1)


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spec_of(n: int, k: int, dtype: str, *, kind: str | None = None, gate: str | None = None) -> LinearSpec:
    scheme = None if kind is None else core_scheme(f"gguf:{kind}")
    return LinearSpec(in_features=k, out_features=n, act_dtype=dtype, out_dtype=dtype, scheme=scheme, gate=gate)


def random_blocks(kind: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of every code and sane scales, and the float32 weight that the `gguf` package reads from them."""
    qtype = gguf.GGMLQuantizationType[kind]
    columns, size = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(n * 1000 + k)
    blocks = rng.integers(0, 256, (n, k // columns, size), dtype=np.uint8)

    def put_half(at: int, value: float) -> None:
        numbers = value * (0.5 + rng.random((n, k // columns, 1)))
        blocks[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)

    put_half(208 if kind == "Q6_K" else 0, 0.001 if kind == "Q6_K" else 0.01)
    if kind in ("Q4_1", "Q5_1"):
        put_half(2, -0.08)
    if kind in ("Q4_K", "Q5_K"):
        put_half(2, 0.02)
    rows = blocks.reshape(n, -1)
    return torch.from_numpy(rows), torch.from_numpy(gguf.dequantize(rows, qtype))


def unpacks(isa: str, dtype: str, tokens: int) -> bool:
    """Whether blocks are unpacked to bfloat16 for a product of so many tokens, with activations as they are."""
    return isa == "amx" and dtype == "bfloat16" and tokens >= 12


def rounded_to_8_bits(x: torch.Tensor) -> torch.Tensor:
    """What the kernels make of activations: blocks of 32, the largest magnitude 127."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    # As a tensor: of a number torch takes the reciprocal first, which rounds once more and moves ties.
    codes = torch.round(blocks * torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0))
    return (codes * (largest / 127)).flatten(-2)


def assert_near(found: torch.Tensor, exact: torch.Tensor, dtype: str) -> None:
    assert found.shape == exact.shape
    assert found.dtype == getattr(torch, dtype)
    if exact.numel():
        assert (found.float() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


def after_gate(product: torch.Tensor, gate: str | None, dtype: str) -> torch.Tensor:
    """The contract's roundings: product, activation and their product, each to the output's dtype."""
    if gate is None:
        return product
    functions = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    kind = getattr(torch, dtype)
    left, right = product.to(kind).float().chunk(2, dim=-1)
    return functions[gate](left).to(kind).float() * right


SHAPES = ((1, 256), (17, 256), (96, 512), (130, 768))
TOKENS = (0, 1, 2, 3, 7, 16, 65)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_block_product_equals_that_of_the_weight_and_the_rounded_activations(isa: str, kind: str, dtype: str) -> None:
    for n, k in SHAPES:
        rows, weight = random_blocks(kind, n, k)
        spec = spec_of(n, k, dtype, kind=kind)
        product = matmul(spec, kind, pack(rows, kind, spec))
        bias = gaussian(n, seed=1).to(getattr(torch, dtype))
        for tokens in TOKENS:
            x = gaussian(tokens, k, seed=tokens).to(getattr(torch, dtype))
            if unpacks(isa, dtype, tokens):
                exact = x.float() @ weight.bfloat16().float().t()
            else:
                exact = rounded_to_8_bits(x) @ weight.t()
            assert_near(product(x, None), exact, dtype)
            assert_near(product(x, bias), exact + bias.float(), dtype)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_exact_block_product_leaves_activations_as_they_are(isa: str, kind: str, dtype: str) -> None:
    for n, k in SHAPES:
        rows, weight = random_blocks(kind, n, k)
        if dtype == "bfloat16" and isa in ("avx512_bf16", "amx"):  # they multiply bfloat16 by bfloat16
            weight = weight.bfloat16().float()
        spec = spec_of(n, k, dtype, kind=kind)
        product = matmul(spec, kind, pack(rows, kind, spec), exact=True)
        for tokens in TOKENS:
            x = gaussian(tokens, k, seed=tokens).to(getattr(torch, dtype))
            assert_near(product(x, None), x.float() @ weight.t(), dtype)


@needs_library
@pytest.mark.parametrize("kind", BLOCKS)
def test_rounding_activations_costs_no_more_than_half_a_code_a_column(isa: str, kind: str) -> None:
    """|y - exact| <= sum over columns of |w| * largest / 254: the bound that the README states."""
    rows, weight = random_blocks(kind, 48, 512)
    spec = spec_of(48, 512, "float32", kind=kind)
    x = gaussian(5, 512, seed=3)
    found = matmul(spec, kind, pack(rows, kind, spec))(x, None)
    steps = x.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=-1) / 254
    exact = x @ weight.t()
    assert ((found - exact).abs() <= 1.001 * steps @ weight.abs().t() + 1e-4).all()
    assert (found - exact).abs().max() > 0, "activations were not rounded: the test shows nothing"


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_product_equals_the_float32_one(isa: str, dtype: str) -> None:
    for n, k in ((1, 1), (17, 31), (96, 64), (50, 200), (40, 2100)):
        weight, bias = (gaussian(*shape, seed=7).to(getattr(torch, dtype)) for shape in ((n, k), (n,)))
        spec = spec_of(n, k, dtype)
        product = matmul(spec, dtype, pack(weight, dtype, spec))
        for tokens in (*TOKENS, 17, 32, 33, 300):
            x = gaussian(tokens, k, seed=tokens).to(getattr(torch, dtype))
            exact = x.float() @ weight.float().t()
            assert_near(product(x, None), exact, dtype)
            assert_near(product(x, bias), exact + bias.float(), dtype)


@needs_library
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_byte_product_equals_that_of_the_scaled_codes(isa: str, dtype: str, exact: bool) -> None:
    """Activations become 8 bits a token, so that both sides are whole numbers times scales, or keep their bits."""
    for n, k in ((1, 1), (17, 31), (96, 64), (50, 2100)):
        g = torch.Generator().manual_seed(n)
        codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
        scales = torch.rand(n, generator=g) * 0.01 + 0.001
        spec = spec_of(n, k, dtype)
        product = matmul(spec, "int8", pack(codes, "int8", spec, scales), exact=exact)
        for tokens in (*TOKENS, 17, 32, 33, 300):
            x = gaussian(tokens, k, seed=tokens).to(getattr(torch, dtype))
            largest = x.float().abs().amax(-1, keepdim=True)
            rounded = torch.round(x.float() * (torch.tensor(127.0) / largest)) * (largest / 127)
            seen = x.float() if exact else rounded
            assert_near(product(x, None), seen @ (codes.float() * scales[:, None]).t(), dtype)


@needs_library
@pytest.mark.parametrize("gate", native.GATES[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_follow_the_product(isa: str, dtype: str, gate: str) -> None:
    rows, weight = random_blocks("Q4_K", 70, 256)
    x, bias = gaussian(6, 256, seed=1).to(getattr(torch, dtype)), gaussian(70, seed=2).to(getattr(torch, dtype))
    spec = spec_of(70, 256, dtype, kind="Q4_K", gate=gate)
    found = matmul(spec, "Q4_K", pack(rows, "Q4_K", spec))(x, bias)
    assert_near(found, after_gate(rounded_to_8_bits(x) @ weight.t() + bias.float(), gate, dtype), dtype)
    plain = gaussian(70, 256, seed=3).to(getattr(torch, dtype))
    spec = spec_of(70, 256, dtype, gate=gate)
    found = matmul(spec, dtype, pack(plain, dtype, spec))(x, bias)
    assert_near(found, after_gate(x.float() @ plain.float().t() + bias.float(), gate, dtype), dtype)
    codes, scale = quantize_rows(plain, "int8")
    found = matmul(spec, "int8", pack(codes, "int8", spec, scale.flatten()), exact=True)(x, bias)
    assert_near(found, after_gate(x.float() @ (codes * scale).t() + bias.float(), gate, dtype), dtype)


@needs_library
def test_activations_of_zero_stay_zero_and_what_is_no_number_is_not_hidden(isa: str) -> None:
    rows, _ = random_blocks("Q4_1", 16, 64)
    spec = spec_of(16, 64, "float32", kind="Q4_1")
    product = matmul(spec, "Q4_1", pack(rows, "Q4_1", spec))
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 40], x[3, 5] = float("nan"), float("inf"), 1e-38
    found = product(x, None)
    assert (found[0] == 0).all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert found[3].abs().max() < 1e-30


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(isa: str, threads: int) -> None:
    rows, _ = random_blocks("Q8_0", 1040, 512)
    spec = spec_of(1040, 512, "float32", kind="Q8_0")
    native.load().octavo_set_threads(1)
    alone = matmul(spec, "Q8_0", pack(rows, "Q8_0", spec))
    x = gaussian(70, 512, seed=1)
    expected = alone(x, None)
    native.load().octavo_set_threads(threads)
    shared = matmul(spec, "Q8_0", pack(rows, "Q8_0", spec))
    for _ in range(20):
        assert torch.equal(shared(x, None), expected)


@needs_library
def test_products_of_several_callers_at_once_are_each_right() -> None:
    native.load().octavo_set_threads(2)
    weight = gaussian(512, 512, seed=1)
    spec = spec_of(512, 512, "float32")
    product = matmul(spec, "float32", pack(weight, "float32", spec))
    wrong = []

    def call(seed: int) -> None:
        x = gaussian(8, 512, seed=seed)
        for _ in range(50):
            if not torch.allclose(product(x, None), x @ weight.t(), atol=1e-3):
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    native.load().octavo_set_threads(1)
    assert not wrong


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_child_multiplies() -> None:
    code = (
        "import os, torch; from octavo_cpu import native; from octavo.plugin import LinearSpec;"
        "from octavo_cpu.linear_native import matmul, pack; native.load().octavo_set_threads(2);"
        "s = LinearSpec(in_features=512, out_features=512, act_dtype='float32', out_dtype='float32');"
        "m = matmul(s, 'float32', pack(torch.ones(512, 512), 'float32', s)); x = torch.ones(4, 512);"
        "m(x, None); pid = os.fork();"
        "good = bool((m(x, None) == 512).all()); native.load().octavo_set_threads(3); m(x, None);"
        "os._exit(not good) if pid == 0 else None; raise SystemExit(os.waitpid(pid, 0)[1])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@needs_library
def test_activations_keep_their_bits_in_float32_unless_told_otherwise() -> None:
    rows, weight = random_blocks("Q4_1", 32, 64)
    rounds = set()
    for choice in ("auto", "always", "never"):
        for dtype in ("bfloat16", "float32"):
            x = gaussian(3, 64, seed=4).to(getattr(torch, dtype))
            spec, kernel = spec_of(32, 64, dtype, kind="Q4_1"), GgufLinear()
            device = CpuDevice(num_threads=1, int8_activations=choice)
            found = kernel.apply(x, kernel.prepare({"weight": rows}, spec, device), None).float()
            far = (found - x.float() @ weight.t()).abs().max()
            if far > (found - rounded_to_8_bits(x) @ weight.t()).abs().max():
                rounds.add((choice, dtype))
    assert rounds == {("auto", "bfloat16"), ("always", "bfloat16"), ("always", "float32")}


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", ["int8", "int8_per_channel_weight_only", "int4"])
def test_plain_weight_is_quantized_while_it_is_loaded(isa: str, number: str, dtype: str) -> None:
    spec = replace(spec_of(70, 96, dtype), scheme=SCHEMES[number])
    kernel = Int4GroupsLinear() if number == "int4" else Int8Linear()
    assert kernel.supports(spec, DEVICE)
    weight = gaussian(70, 96, seed=1).to(getattr(torch, dtype))
    packed = kernel.prepare({"weight": weight}, spec, DEVICE)
    known = dequantize_weight({"weight": weight.float()}, SCHEMES[number], torch.float32)
    for tokens in (1, 3):
        x = gaussian(tokens, 96, seed=2).to(getattr(torch, dtype))
        if number == "int8":
            codes, scale = quantize_rows(x, "int8")
            assert_near(kernel.apply(x, packed, None), (codes * scale) @ known.t(), dtype)
        else:
            exact = dtype == "float32" or number != "int4"
            seen = x.float() if exact else rounded_to_8_bits(x)
            assert_near(kernel.apply(x, packed, None), seen @ known.t(), dtype)
    assert not kernel.supports(spec_of(70, 96, dtype), DEVICE)


@needs_library
def test_refusals_name_what_is_not_read() -> None:
    assert "gguf:Q2_K" in GgufLinear.supports(spec_of(32, 256, "bfloat16", kind="Q2_K"), DEVICE).reason
    assert "96 in_features" in GgufLinear.supports(spec_of(32, 96, "bfloat16", kind="Q4_K"), DEVICE).reason
    assert "float64" in PlainLinear.supports(spec_of(32, 64, "float64"), DEVICE).reason


@needs_library
@pytest.mark.parametrize("gate", native.GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_of_another_scheme_is_unpacked_at_load(dtype: str, gate: str | None) -> None:
    rows, weight = random_blocks("Q4_1", 64, 96)
    weight = weight.to(getattr(torch, dtype)).float()
    spec, kernel = spec_of(64, 96, dtype, kind="Q4_1", gate=gate), PlainLinear()
    assert kernel.supports(spec, DEVICE)
    packed = kernel.prepare({"weight": rows}, spec, DEVICE)
    for tokens in (0, 1, 20):
        x = gaussian(tokens, 96, seed=tokens).to(getattr(torch, dtype))
        exact = after_gate(x.float() @ weight.t(), gate, dtype)
        found = kernel.apply(x, packed, None)
        assert found.shape == exact.shape
        if tokens:
            assert (found.float() - exact).abs().max() <= 2 * ROUNDING[dtype] * exact.abs().max()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_product_of_many_tokens_lands_where_it_belongs(isa: str, dtype: str) -> None:
    """More tokens than are multiplied at a time, for a layer of plain numbers and one of blocks."""
    x, bias = gaussian(600, 256, seed=1).to(getattr(torch, dtype)), gaussian(70, seed=2).to(getattr(torch, dtype))
    plain = gaussian(70, 256, seed=3).to(getattr(torch, dtype))
    spec = spec_of(70, 256, dtype, gate="silu")
    found = matmul(spec, dtype, pack(plain, dtype, spec))(x, bias)
    assert_near(found, after_gate(x.float() @ plain.float().t() + bias.float(), "silu", dtype), dtype)
    rows, weight = random_blocks("Q8_0", 70, 256)
    spec = spec_of(70, 256, dtype, kind="Q8_0", gate="silu")
    found = matmul(spec, "Q8_0", pack(rows, "Q8_0", spec), exact=True)(x, bias)
    allowed = 2 * ROUNDING[dtype]  # some instruction sets unpack to bfloat16
    exact = after_gate(x.float() @ weight.t() + bias.float(), "silu", dtype)
    assert (found.float() - exact).abs().max() <= allowed * exact.abs().max()


@needs_library
def test_strided_activations_are_read_as_they_stand(isa: str) -> None:
    weight, x = gaussian(40, 64, seed=1), gaussian(64, 6, seed=2).t()
    spec = spec_of(40, 64, "float32")
    assert not x.is_contiguous()
    assert_near(matmul(spec, "float32", pack(weight, "float32", spec))(x, None), x @ weight.t(), "float32")


@needs_library
@pytest.mark.parametrize("kind", [*DTYPES, "int8", *BLOCKS])
def test_what_lay_in_the_memory_before_changes_nothing(isa: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of a weight is written when it is packed, that of activations in each product."""
    n, k = (17, 256) if kind in BLOCKS else (17, 35)
    dtype = kind if kind in DTYPES else "float32"
    full = (memory := WeightMemory()).take
    monkeypatch.setattr("octavo_cpu.linear_native.MEMORY", memory)
    monkeypatch.setattr(memory, "take", lambda size: full(size).fill_(0xFF))
    spec = spec_of(n, k, dtype, kind=kind if kind in BLOCKS else None)
    if kind in BLOCKS:
        rows, weight = random_blocks(kind, n, k)
        product = matmul(spec, kind, pack(rows, kind, spec))
    elif kind == "int8":
        rows, scales = quantize_rows(gaussian(n, k, seed=1), "int8")
        weight = rows.float() * scales
        product = matmul(spec, kind, pack(rows, kind, spec, scales.flatten()))
    else:
        weight = gaussian(n, k, seed=1).to(getattr(torch, kind))
        product = matmul(spec, kind, pack(weight, kind, spec))
    x = gaussian(5, k, seed=2).to(getattr(torch, dtype))
    for dirt in (torch.full((64, 4000), float("nan")), torch.full((64, 4000), float("inf"))):
        for other in DTYPES:  # their rows fill the memory in which the product prepares its own
            wide = spec_of(2, 4000, other)
            matmul(wide, other, pack(torch.ones(2, 4000, dtype=getattr(torch, other)), other, wide))(
                dirt.to(getattr(torch, other)), None
            )
        found = product(x, None)
        assert found.isfinite().all()
        assert (
            found.float() - x.float() @ weight.float().t()
        ).abs().max() <= 0.05 * x.abs().max() * weight.abs().max() * k**0.5
        others = product(torch.cat([x[:2], torch.full_like(x[:1], float("nan")), x[3:]]), None)
        kept = [0, 1, 3, 4]
        assert torch.equal(others[kept], found[kept]), "one row's numbers got into another's"
