"""The reference linear kernel multiplies plain and packed weights alike."""

from __future__ import annotations

import gguf
import pytest
import torch

from octavo.errors import UnsupportedModelError
from octavo.ops.linear import ReferenceLinear
from octavo.plugin import LinearSpec, QuantScheme
from octavo.plugin.torch import TorchDevice
from octavo.quant.gguf_blocks import FORMATS, scheme

CPU = TorchDevice("cpu")


def spec_of(*, act: str = "float32", out: str = "float32", scheme: QuantScheme | None = None) -> LinearSpec:
    return LinearSpec(in_features=64, out_features=24, act_dtype=act, out_dtype=out, scheme=scheme)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


@pytest.mark.parametrize("bias", [None, random(24)])
def test_a_plain_weight_multiplies_and_adds_its_bias(bias: torch.Tensor | None) -> None:
    kernel, weight, x = ReferenceLinear(), random(24, 64), random(5, 64)
    packed = kernel.prepare({"weight": weight}, spec_of(), CPU)
    expected = x @ weight.T + (0 if bias is None else bias)
    torch.testing.assert_close(kernel.apply(x, packed, bias), expected)


def test_the_weight_takes_the_activations_dtype_and_the_result_the_specs() -> None:
    kernel = ReferenceLinear()
    packed = kernel.prepare({"weight": random(24, 64)}, spec_of(act="bfloat16", out="float32"), CPU)
    assert packed.weight.dtype == torch.bfloat16
    y = kernel.apply(random(5, 64).bfloat16(), packed, None)
    assert y.dtype == torch.float32
    assert torch.equal(y, y.bfloat16().float())


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_packed_weight_gives_what_its_decoded_numbers_give(qtype: str) -> None:
    kernel, x = ReferenceLinear(), random(5, 64)
    kind = gguf.GGMLQuantizationType[qtype]
    rows = gguf.quantize(random(24, 64).numpy(), kind)
    packed = kernel.prepare({"weight": torch.from_numpy(rows)}, spec_of(scheme=scheme(qtype)), CPU)
    decoded = torch.from_numpy(gguf.dequantize(rows, kind))
    torch.testing.assert_close(kernel.apply(x, packed, None), x @ decoded.T)


def test_equal_specs_may_share_a_kernel_because_it_keeps_no_state() -> None:
    kernel, x = ReferenceLinear(), random(5, 64)
    one, two = (kernel.prepare({"weight": w}, spec_of(), CPU) for w in (random(24, 64), -random(24, 64)))
    assert torch.equal(kernel.apply(x, one, None), -kernel.apply(x, two, None))


def test_the_reference_takes_every_spec_whose_format_says_how_to_dequantize() -> None:
    for qtype in FORMATS:
        assert ReferenceLinear.supports(spec_of(scheme=scheme(qtype)), CPU)
    foreign = spec_of(scheme=QuantScheme(weight="int4", packing="foreign"))
    with pytest.raises(UnsupportedModelError, match="packed as 'foreign'"):
        ReferenceLinear().prepare({"weight": random(24, 64)}, foreign, CPU)
