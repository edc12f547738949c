"""Which kernel takes a product, and that all of them are right: HIP kernels on the host, Triton interpreted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_hip import host_products

from octavo.ops.bind import KernelTable
from octavo.ops.catalogue import CATALOGUE, reference
from octavo.plugin import LinearSpec, QuantScheme
from octavo.plugin.torch import ScaledRows, core_scheme, dequantize_weight, quantize_rows
from octavo.triton import linear_fp8
from octavo.triton.linear_fp8 import ONLINE
from octavo_rocm import products, torch_ops
from octavo_rocm.fp8 import FnuzLinear, Fp8Linear
from octavo_rocm.gguf import GgufLinear
from octavo_rocm.hip import HipError
from octavo_rocm.int4 import Int4Linear
from octavo_rocm.linear import HipblasltLinear, HipLinear, TritonLinear
from octavo_rocm.ops import register
from octavo_rocm.targets import TARGETS
from octavo_rocm.tuning import tuning_for

DTYPE = "bfloat16"
INT4 = core_scheme("online:int4")


class Card:
    """A device that says it is an AMD card, over the host's memory."""

    type = "cuda"
    index = 0
    torch_device = torch.device("cpu")

    def __init__(self, arch: str = "gfx942") -> None:
        self.arch = arch

    def describe(self) -> Any:
        return SimpleNamespace(name="AMD", compute_units=304)


def spec(out: int = 48, inp: int = 256, **changes: Any) -> LinearSpec:
    fields = {"in_features": inp, "out_features": out, "act_dtype": DTYPE, "out_dtype": DTYPE, "max_tokens": 300}
    return LinearSpec(**fields | changes)  # type: ignore[arg-type]


built = cache(host_products)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The HIP kernels serve tensors of the host; the formats that were asked for."""
    used: list[str] = []

    def gemv(x: Any, weight: Any, groups: Any, bias: Any, weight_format: str) -> Any:
        used.append(weight_format)
        return built(weight_format, x.dtype).gemv(x, weight, groups, bias)

    def unpack(weight: Any, groups: Any, num_in: int, weight_format: str, dtype: Any) -> Any:
        used.append(f"unpack {weight_format}")
        return built(weight_format, dtype).unpack(weight, groups, num_in, dtype)

    library = torch.library.Library("octavo_rocm", "IMPL")
    library.impl("gemv", gemv, "CPU")
    library.impl("unpack", unpack, "CPU")
    monkeypatch.setattr(products, "card_objection", lambda *arguments: "")
    yield used
    library._destroy()


def check(kernel: Any, weights: dict[str, torch.Tensor], plain: torch.Tensor, spec_: LinearSpec, counts: Any) -> None:
    packed = kernel.prepare(weights, spec_, Card())
    bias = torch.randn(spec_.out_features).to(plain.dtype)
    for tokens in counts:
        x = torch.randn(tokens, spec_.in_features).to(plain.dtype)
        found = kernel.apply(x, packed, bias)
        expected = F.linear(x.float(), plain.float(), bias.float())
        assert found.shape == expected.shape
        assert found.dtype == plain.dtype
        if tokens:
            assert products.relative(found, expected) < 2e-2, f"{tokens} tokens"


def test_few_tokens_are_multiplied_by_the_hip_kernel_and_more_by_the_library(on_host: list[str]) -> None:
    weight = torch.randn(48, 256).bfloat16()
    assert HipLinear.supports(spec(), Card()).ok
    check(HipLinear(), {"weight": weight}, weight, spec(), (0, 1, 3, 4, 5))
    assert on_host == ["Plain"] * 3


def test_triton_multiplies_few_tokens_where_no_hip_kernel_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*arguments: object) -> None:
        raise HipError("no library of ROCm has hiprtcCompileProgram")

    monkeypatch.setattr(products, "products_for", no_compiler)
    assert "cannot be used: no library of ROCm has" in HipLinear.supports(spec(), Card()).reason
    weight = torch.randn(48, 256).bfloat16()
    assert TritonLinear.supports(spec(), Card()).ok
    check(TritonLinear(), {"weight": weight}, weight, spec(), (0, 1, 2, 4, 5))


@pytest.mark.parametrize("qtype", products.BLOCKS)
def test_gguf_blocks_stay_as_they_are(on_host: list[str], qtype: str) -> None:
    packed, _, num_in, plain = products.sample(qtype, torch.bfloat16)
    scheme = core_scheme(f"gguf:{qtype}")
    wanted = spec(len(packed), num_in, scheme=scheme)
    assert GgufLinear.supports(wanted, Card()).ok
    check(GgufLinear(), {"weight": packed}, plain, wanted, (1, 4, 7))
    assert on_host == [qtype, qtype, f"unpack {qtype}"]


@pytest.mark.parametrize("qtype", products.BLOCKS)
def test_rows_of_gguf_blocks_are_looked_up_as_embedding_part_does(on_host: list[str], qtype: str) -> None:
    packed, _, num_in, _ = products.sample(qtype, torch.bfloat16)
    scheme = core_scheme(f"gguf:{qtype}")
    kernel = GgufLinear()
    weight = kernel.prepare({"weight": packed}, spec(len(packed), num_in, scheme=scheme), Card())
    table = dequantize_weight({"weight": packed}, scheme, torch.bfloat16)
    part = reference("embedding_part")
    for ids in (torch.randperm(len(packed)), torch.tensor([69, 70, 75, 70 + len(packed), -1]), torch.tensor([]).long()):
        for first, factor in ((0, None), (70, None), (70, 5.3)):
            found = kernel.look_up(weight, ids.int(), first, factor)
            assert torch.equal(found, part(ids, table, first, factor))


@pytest.mark.parametrize("hip", [True, False])
def test_one_layout_of_4_bit_codes_serves_all_numbers_of_tokens(on_host: list[str], hip: bool) -> None:
    weight = torch.randn(48, 256).bfloat16()
    plain = dequantize_weight({"weight": weight}, INT4, torch.bfloat16)
    check(Int4Linear.with_hip(hip)(), {"weight": weight}, plain, spec(scheme=INT4), (0, 1, 4, 5, 20, 257))
    assert on_host == (["Int4"] * 2 if hip else [])


def test_gates_follow_the_hip_kernel(on_host: list[str]) -> None:
    weight = torch.randn(64, 64).bfloat16()
    packed = Int4Linear().prepare({"weight": weight}, spec(64, 64, scheme=INT4, gate="silu"), Card())
    plain = dequantize_weight({"weight": weight}, INT4, torch.bfloat16).float()
    for tokens in (2, 6, 260):
        x = torch.randn(tokens, 64).bfloat16()
        gate, up = F.linear(x.float(), plain).chunk(2, dim=-1)
        assert products.relative(Int4Linear().apply(x, packed, None), F.silu(gate) * up) < 2e-2
    assert on_host == ["Int4"]


def test_narrow_products_are_split_so_that_all_units_work() -> None:
    for name in TARGETS:
        tuning = tuning_for(Card(name))  # type: ignore[arg-type]
        assert tuning.units == 304
        assert tuning.int4(4096, 14336, 16).split_k > 1
        assert tuning.gemv(4096, 14336, 4).split_k > 1
        skinny = tuning.skinny(4096, 14336, 64, itemsize=1)
        assert skinny.programs == 304 > 4096 // skinny.block_n
        assert skinny.num_stages == tuning.int4(4096, 14336, 16).num_stages == 2, "tiles on their way take LDS"


# -- fp8 --


def test_ocp_numbers_become_fnuz_ones_exactly() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(torch.float8_e4m3fn)
    finite = ~values.float().isnan()
    rows = FnuzLinear().in_own_format(ScaledRows(values[None], torch.full((1, 1), 0.25)))
    assert rows.values.dtype == torch.float8_e4m3fnuz
    found = (rows.values.float() * rows.scale)[0]
    assert torch.equal(found[finite], values.float()[finite] * 0.25)
    with pytest.raises(AssertionError, match="exactly"):
        FnuzLinear().in_own_format(rows)


FP8_ERROR = 0.12
"""Of the largest result. Triton's interpreter loses the carry when a number rounds up to a power of two."""


class InTorch:
    """Core's fp8 kernels in plain PyTorch: Triton's interpreter knows no fnuz numbers."""

    def quantize_fp8(self, x: Any, *, dtype: Any, **rest: Any) -> Any:
        scale = x.float().abs().amax(1, keepdim=True) / torch.finfo(dtype).max
        return (x.float() / scale).to(dtype), scale

    def gemv_fp8(self, x: Any, weight: Any, scale: Any, bias: Any, *, gate: Any, **rest: Any) -> Any:
        return self.act_and_mul((x.float() @ weight.float().t() * scale).bfloat16(), gate)

    def skinny(self, x: Any, weight: Any, bias: Any, *, scale: Any, x_scale: Any, gate: Any, **rest: Any) -> Any:
        assert x.dtype == weight.dtype, "the matrix unit multiplies one kind of numbers"
        return self.act_and_mul((x.float() @ weight.float().t() * scale * x_scale).bfloat16(), gate)

    def act_and_mul(self, y: Any, gate: Any, **rest: Any) -> Any:
        first, second = y.chunk(2, dim=-1)
        return y if gate is None else F.silu(first) * second

    def act_and_mul_fp8(self, y: Any, gate: Any, *, dtype: Any, **rest: Any) -> Any:
        return self.quantize_fp8(self.act_and_mul(y, gate), dtype=dtype)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_fp8_products_agree_with_plain_ones(arch: str, gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: Any, b: Any, *, scale_a: Any, scale_b: Any, bias: Any, out_dtype: Any, use_fast_accum: bool) -> Any:
        y = (a.float() * scale_a) @ (b.float() * scale_b)
        return (y if bias is None else y + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    scheme = QuantScheme(weight="fp8_e4m3", act="fp8_e4m3", granularity="channel", packing=ONLINE)
    wanted = spec(scheme=scheme, gate=gate)
    torch.manual_seed(0)
    cls = FnuzLinear if arch == "gfx942" else Fp8Linear
    assert cls.supports(wanted, Card(arch)).ok  # type: ignore[arg-type]
    kernel, weight = cls(), torch.randn(48, 256).bfloat16()
    if arch == "gfx942":
        for name in ("gemv_fp8", "skinny", "quantize_fp8", "act_and_mul", "act_and_mul_fp8"):
            monkeypatch.setattr(linear_fp8, name, getattr(InTorch(), name))
    packed = kernel.prepare({"weight": weight}, wanted, Card(arch))  # type: ignore[arg-type]
    assert packed.weight.dtype == (torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn)
    codes, scale = quantize_rows(weight)
    for tokens in (1, 8, 9, 65):
        x = torch.randn(tokens, 256).bfloat16()
        values, x_scale = quantize_rows(x)
        expected = (x.float() if tokens <= 8 else values.float() * x_scale) @ (codes.float() * scale).t()
        if gate:
            first, second = expected.chunk(2, dim=-1)
            expected = F.silu(first) * second
        assert products.relative(kernel.apply(x, packed, None), expected) < FP8_ERROR
        if tokens > 8:
            rows = ScaledRows(*quantize_rows(x))
            assert products.relative(kernel.apply(rows, packed, None), expected) < FP8_ERROR
            if gate:
                scaled = kernel.apply_scaled(rows, packed, None)
                assert scaled.values.dtype == packed.weight.dtype
                assert products.relative(scaled.values.float() * scaled.scale, expected) < FP8_ERROR


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
def test_fp8_is_refused_without_its_matrix_units(arch: str) -> None:
    scheme = QuantScheme(weight="fp8_e4m3", act="fp8_e4m3", packing=ONLINE)
    assert arch in Fp8Linear.supports(spec(scheme=scheme), Card(arch)).reason


# -- who is asked, and in which order --


def test_every_registered_op_is_in_the_catalogue() -> None:
    table = KernelTable()
    register(table, Card(), triton=True, hip=True)  # type: ignore[arg-type]
    registered = {name for name in CATALOGUE if table.providers(name)}
    assert registered >= {"rms_norm", "add_rms_norm", "qkv_norm_rope_write", "act_and_mul", "sample", "greedy"}
    names = [cls.name for cls in table.classes("linear")]
    assert names == ["fp8_fnuz", "fp8", "int4", "gguf", "hip", "triton", "hipblaslt"]
    assert [cls.name for cls in table.classes("attention")] == ["triton"]
    assert not table.providers("add_rms_norm_fp8"), "core's quantized rows are OCP's, which a gfx942 does not multiply"
    ocp = KernelTable()
    register(ocp, Card("gfx950"), triton=True, hip=True)  # type: ignore[arg-type]
    assert ocp.providers("add_rms_norm_fp8")
    wanted = spec(scheme=QuantScheme(weight="fp8_e4m3", act="fp8_e4m3", packing=ONLINE))
    taken = {arch: [c.name for c in (FnuzLinear, Fp8Linear) if c.supports(wanted, Card(arch)).ok] for arch in TARGETS}
    assert taken["gfx942"] == ["fp8_fnuz"]
    assert taken["gfx950"] == taken["gfx1201"] == ["fp8"]
    assert FnuzLinear.scaled_rows_from == math.inf


@pytest.mark.parametrize(
    ("packing", "kernel"),
    [
        ("", "hip"),
        ("gguf:Q8_0", "gguf"),
        ("gguf:Q4_0", "int4"),
        ("gguf:Q4_K", "int4"),
        ("online:int4", "int4"),
        ("gguf:Q6_K", "hip"),
    ],
)
def test_weights_stay_packed_where_a_kernel_reads_them(on_host: list[str], packing: str, kernel: str) -> None:
    table = KernelTable()
    register(table, Card(), triton=True, hip=True)  # type: ignore[arg-type]
    wanted = spec(scheme=core_scheme(packing) if packing else None)
    assert table.linear_kernel(wanted, Card()).name == kernel  # type: ignore[arg-type]


def test_without_triton_and_hip_only_the_library_multiplies(caplog: pytest.LogCaptureFixture) -> None:
    table = KernelTable()
    register(table, Card(), triton=False, hip=False)  # type: ignore[arg-type]
    assert [cls.name for cls in table.classes("linear")] == ["hipblaslt"]
    assert "Triton is not installed" in caplog.text


@pytest.mark.parametrize("kernel", [HipblasltLinear, HipLinear, TritonLinear, GgufLinear, Int4Linear, Fp8Linear])
def test_refusals_have_reasons(kernel: Any) -> None:
    host = SimpleNamespace(type="cpu", index=0)
    for wanted in (
        spec(act_dtype="float64", out_dtype="float64"),
        spec(out_dtype="float32"),
        spec(scheme=QuantScheme(weight="int8", act="int8", packing="online:int8")),
    ):
        for device in (Card(), host):
            answer = kernel.supports(wanted, device)
            assert not answer.ok
            assert answer.reason


def test_products_are_traced_as_one_node() -> None:
    """With fake tensors, as the compiler and a pass over a whole model have: shapes only, and nothing is launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False):
        x = torch.empty(3, 64, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(40, 64, dtype=torch.bfloat16, device="cuda")
        y = HipLinear().apply(x, weight, None)
        assert (tuple(y.shape), y.dtype, y.device.type) == ((3, 40), torch.bfloat16, "cuda")
        more = HipLinear().apply(torch.empty(5, 64, dtype=torch.bfloat16, device="cuda"), weight, None)
        assert tuple(more.shape) == (5, 40)
        rows = torch.empty(40, 68, dtype=torch.uint8, device="cuda")
        assert tuple(torch_ops.unpack(rows, None, 64, "Q8_0", torch.float16).shape) == (40, 64)
