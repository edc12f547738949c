"""Products with packed weights against those with what the weights stand for, on plain torch and through torch_tpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.plugin import LinearSpec, MemInfo
from octavo.plugin.torch import TorchDevice, core_scheme, dequantize_weight, quantize_rows
from octavo.testing.conformance.schemes import quantized_weight
from octavo.testing.tiny import make_model
from octavo_tpu.linear import Int4Linear, Int8Linear

IN, OUT = 128, 96
KERNELS: dict[str, Any] = {
    "gguf:Q4_0": Int4Linear,
    "gguf:Q4_1": Int4Linear,
    "online:int4": Int4Linear,
    "gguf:Q8_0": Int8Linear,
    "online:int8": Int8Linear,
    "online:int8_per_channel_weight_only": Int8Linear,
}
BITS = {Int4Linear: 4 + 2 * 32 / 32, Int8Linear: 8 + 32 / 32}
"""Of one weight, with its share of float32 scales and offsets."""


def spec_of(packing: str | None, dtype: str = "float32") -> LinearSpec:
    scheme = core_scheme(packing) if packing else None
    return LinearSpec(in_features=IN, out_features=OUT, act_dtype=dtype, out_dtype=dtype, scheme=scheme)


def device_at(place: str) -> TorchDevice:
    if place == "tpu":
        from octavo_tpu.device import TpuDevice

        return TpuDevice(hbm_bytes=1 << 30)
    return TorchDevice("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))


@pytest.mark.parametrize("packing", KERNELS)
def test_a_packed_weight_multiplies_as_what_it_stands_for_and_stays_packed(place: str, packing: str) -> None:
    spec, device, kernel = spec_of(packing), device_at(place), KERNELS[packing]()
    assert spec.scheme is not None
    assert kernel.supports(spec, device)
    weight = quantized_weight(spec.scheme, OUT, IN, seed=3, dtype="float32")
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-1, 1, OUT)
    seen = x
    if spec.scheme.act == "int8":
        codes, scale = quantize_rows(x, "int8")
        seen = codes.float() * scale
    expected = torch.nn.functional.linear(
        seen, dequantize_weight({"weight": weight.clone()}, spec.scheme, torch.float32), bias
    )
    packed = kernel.prepare({"weight": weight}, spec, device)
    with device.inference():
        got = kernel.apply(x.to(place), packed, bias.to(place)).cpu()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    held = [value for value in vars(packed).values() if isinstance(value, torch.Tensor)]
    bits = 8 * sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert bits <= OUT * IN * BITS[KERNELS[packing]]


@pytest.mark.parametrize("kernel", [Int4Linear, Int8Linear])
def test_a_refusal_says_why(kernel: Any) -> None:
    device = device_at("cpu")
    assert "plain weights" in kernel.supports(spec_of(None), device).reason
    assert "gguf:Q6_K" in kernel.supports(spec_of("gguf:Q6_K"), device).reason
    assert "online:fp8" in kernel.supports(spec_of("online:fp8"), device).reason


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_compiled_step_with_packed_weights_gives_the_tokens_of_unpacked_ones(
    tmp_path: Path, tpu_on_cpu: str, quantization: str
) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    settings: dict[str, Any] = {
        "dtype": "float32",
        "quantization": quantization,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "num_kv_blocks": 9,
        "block_size": 16,
        "skip_tokenizer_init": True,
    }
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    tokens = []
    for platform, forced in ((tpu_on_cpu, {}), ("cpu", {"kernels": (("linear", "reference"),), "enforce_eager": True})):
        with LLM(model, platform=platform, **settings, **forced) as llm:
            found = llm.generate([[5, 6, 7], list(range(20))], params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in found])
    assert tokens[0] == tokens[1]
