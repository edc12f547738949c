"""Linear kernels against a float32 product with the plain (or here unpacked) weight."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.plugin import LinearSpec, MemInfo
from octavo.plugin.torch import core_scheme
from octavo_cpu.device import CpuDevice
from octavo_cpu.linear import Int4Linear, OneDnnLinear, Packed, packs

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


class FixedDevice(CpuDevice):
    """A device whose memory and arithmetic the test chooses."""

    def __init__(self, *, wide_copy: bool = True, native_bf16: bool = False, free: int = 1 << 40) -> None:
        super().__init__(num_threads=1, wide_copy=wide_copy)
        self.native_bf16 = native_bf16
        self._memory = lambda: MemInfo(total=1 << 40, free=free)


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spec_of(n: int, k: int, dtype: str, *, packing: str | None = None, bias: bool = False) -> LinearSpec:
    scheme = None if packing is None else core_scheme(packing)
    return LinearSpec(in_features=k, out_features=n, act_dtype=dtype, out_dtype=dtype, scheme=scheme, bias=bias)


def assert_near(found: torch.Tensor, exact: torch.Tensor, dtype: str) -> None:
    """Relative to the largest output: a product of sums has no meaningful error for each element alone."""
    assert found.shape == exact.shape
    assert found.dtype == getattr(torch, dtype)
    if exact.numel():
        assert (found.float() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


DEVICES = {
    "wide": FixedDevice(),
    "narrow": FixedDevice(wide_copy=False),
}
if packs(torch.bfloat16):  # no CPU has bfloat16 products in hardware that oneDNN cannot multiply at all
    DEVICES["native"] = FixedDevice(native_bf16=True)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 33])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_plain_weight_equals_the_float32_product(tokens: int, dtype: str, device: str, bias: bool) -> None:
    torch_dtype = getattr(torch, dtype)
    weight = gaussian(72, 40, seed=1).to(torch_dtype)
    offset = gaussian(72, seed=2).to(torch_dtype) if bias else None
    x = gaussian(tokens, 40, seed=3).to(torch_dtype)
    kernel, spec = OneDnnLinear(), spec_of(72, 40, dtype, bias=bias)
    assert kernel.supports(spec, DEVICES[device])
    packed = kernel.prepare({"weight": weight}, spec, DEVICES[device])
    exact = x.float() @ weight.float().t() + (offset.float() if offset is not None else 0)
    assert_near(kernel.apply(x, packed, offset), exact, dtype)


def q4_rows(n: int, k: int, *, has_offset: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random GGUF rows, and the float32 weight that they mean, element by element."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k // 32, 32), generator=g)
    scale = (torch.rand(n, k // 32, 1, generator=g) * 0.02 + 0.001).half()
    offset = -(torch.rand(n, k // 32, 1, generator=g) * 0.2).half()
    quants = (codes[..., :16] | codes[..., 16:] << 4).to(torch.uint8)
    numbers = torch.cat([scale, offset], dim=-1) if has_offset else scale
    rows = torch.cat([numbers.contiguous().view(torch.uint8), quants], dim=-1).flatten(1)
    weight = codes * scale.float() + offset.float() if has_offset else (codes - 8) * scale.float()
    return rows, weight.flatten(1)


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 9, 33])
@pytest.mark.parametrize("packing", ["gguf:Q4_0", "gguf:Q4_1"])
@pytest.mark.parametrize("device", DEVICES)
def test_int4_equals_the_unpacked_weight(tokens: int, packing: str, device: str) -> None:
    rows, weight = q4_rows(48, 96, has_offset=packing == "gguf:Q4_1", seed=5)
    spec, kernel = spec_of(48, 96, "bfloat16", packing=packing), Int4Linear()
    assert kernel.supports(spec, DEVICES[device])
    packed = kernel.prepare({"weight": rows}, spec, DEVICES[device])
    x, bias = gaussian(tokens, 96, seed=6).bfloat16(), gaussian(48, seed=7).bfloat16()
    assert_near(kernel.apply(x, packed, None), x.float() @ weight.t(), "bfloat16")
    assert_near(kernel.apply(x, packed, bias), x.float() @ weight.t() + bias.float(), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_weight_without_its_own_kernel_is_unpacked_at_load(dtype: str) -> None:
    rows, weight = q4_rows(40, 64, has_offset=True, seed=8)
    spec, kernel = spec_of(40, 64, dtype, packing="gguf:Q4_1"), OneDnnLinear()
    assert not Int4Linear.supports(spec, DEVICES["wide"]), "40 rows are no multiple of 16"
    packed = kernel.prepare({"weight": rows}, spec, DEVICES["wide"])
    for tokens in (1, 5):
        x = gaussian(tokens, 64, seed=9).to(getattr(torch, dtype))
        assert_near(kernel.apply(x, packed, None), x.float() @ weight.t(), dtype)


def limit_of(dtype: str, device: CpuDevice) -> int:
    packed: Packed = OneDnnLinear().prepare({"weight": gaussian(32, 32, seed=1)}, spec_of(32, 32, dtype), device)
    return packed.limit


@pytest.mark.skipif(not packs(torch.bfloat16), reason="oneDNN multiplies no bfloat16 on this CPU")
def test_second_copy_is_kept_only_where_it_helps_and_fits() -> None:
    everything = limit_of("bfloat16", DEVICES["narrow"])
    assert limit_of("bfloat16", DEVICES["wide"]) == 1
    assert limit_of("float32", DEVICES["wide"]) == 3
    assert limit_of("bfloat16", DEVICES["native"]) == everything
    assert limit_of("bfloat16", FixedDevice(free=(1 << 39) + 100)) == everything
    assert limit_of("bfloat16", FixedDevice(free=(1 << 39) + 32 * 32 * 4 + 1)) == 1


@pytest.mark.parametrize(
    ("kernel", "spec", "word"),
    [
        (Int4Linear, spec_of(48, 64, "bfloat16", packing="gguf:Q8_0"), "Q8_0"),
        (Int4Linear, spec_of(48, 64, "bfloat16"), "none"),
        (Int4Linear, spec_of(48, 64, "float32", packing="gguf:Q4_1"), "float32"),
        (Int4Linear, spec_of(40, 64, "bfloat16", packing="gguf:Q4_1"), "40x64"),
        (OneDnnLinear, spec_of(48, 64, "float64"), "float64"),
    ],
)
def test_refusals_say_why(kernel: type, spec: LinearSpec, word: str) -> None:
    answer = kernel.supports(spec, DEVICES["wide"])
    assert not answer.ok
    assert word in answer.reason


def test_other_devices_are_refused() -> None:
    spec = spec_of(48, 64, "bfloat16", packing="gguf:Q4_1")
    for kernel in (Int4Linear, OneDnnLinear):
        assert "cpu device" in kernel.supports(spec, SimpleNamespace(type="elsewhere")).reason
