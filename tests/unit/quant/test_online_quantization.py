"""`--quantization fp8` on a plain checkpoint: a kernel quantizes; a platform without one serves the same numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.ops.linear import ReferenceLinear
from octavo.plugin import LinearSpec, MatrixSpec
from octavo.plugin.torch import dequantize_weight, int4_groups
from octavo.quant.online import SCHEMES, Online, is_plain, quantize_groups, quantize_rows, round_rows
from octavo.testing.tiny import make_model

OPTIONS = {"platform": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 32, "skip_tokenizer_init": True}


def test_linear_layers_are_asked_for_in_fp8_and_the_vocabulary_is_not() -> None:
    online, sizes = Online({"method": "fp8"}), {"out_features": 8, "in_features": 4}
    layer = online.layer(MatrixSpec(name="model.layers.0.mlp.down_proj", kind="linear", **sizes))
    assert layer is not None
    assert layer.scheme == SCHEMES["fp8"]
    assert layer.tensors["weight"].shape == (8, 4)
    assert online.layer(MatrixSpec(name="lm_head", kind="head", **sizes)) is None
    assert online.layer(MatrixSpec(name="model.embed_tokens", kind="embedding", **sizes)) is None
    assert is_plain(None)
    assert is_plain(SCHEMES["fp8"])


def test_rows_quantize_within_half_a_step_and_zero_rows_stay_zero() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    values, scale = quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    error = (values.float() * scale - x).abs()
    assert (error <= x.abs() * 2**-4 + scale * 2**-10).all()
    assert values.float().abs().amax(dim=1).tolist() == [448, 448, 448, 0, 448]


def test_rows_of_bytes_quantize_within_half_a_step() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    values, scale = quantize_rows(x, "int8")
    assert values.dtype == torch.int8
    assert ((values * scale - x).abs() <= 0.5001 * scale).all()
    assert values.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127]


def test_groups_quantize_within_half_a_step_and_flat_ones_keep_their_value() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.25
    codes, scale, _ = quantize_groups(weight)
    assert (codes.amin(), codes.amax()) == (0, 15)
    assert torch.equal(scale.half().float(), scale)
    decoded = dequantize_weight({"weight": weight}, SCHEMES["int4"], torch.float32)
    step = scale.repeat_interleave(32, dim=1)
    assert ((decoded - weight).abs() <= 0.52 * step + 1e-3).all()
    assert (decoded[3] == 0.25).all()
    assert torch.equal(int4_groups({"weight": weight}, SCHEMES["int4"])[0], codes)
    with pytest.raises(UnsupportedModelError, match="multiples of 32, not 40"):
        quantize_groups(torch.zeros(2, 40))


def test_the_reference_rounds_activations_to_bytes_for_int8() -> None:
    g = torch.Generator().manual_seed(1)
    weight, x = torch.randn(8, 32, generator=g), torch.randn(3, 32, generator=g)
    spec = LinearSpec(
        in_features=32, out_features=8, act_dtype="float32", out_dtype="float32", scheme=SCHEMES["int8"], max_tokens=3
    )
    kernel, host = ReferenceLinear(), SimpleNamespace(torch_device=torch.device("cpu"))
    y = kernel.apply(x, kernel.prepare({"weight": weight.clone()}, spec, host), None)
    torch.testing.assert_close(y, round_rows(x, "int8") @ round_rows(weight, "int8").T)
    exact = x @ weight.T
    assert 0.001 < (y - exact).norm() / exact.norm() < 0.02


def test_the_reference_multiplies_what_fp8_keeps_of_weights_and_activations() -> None:
    g = torch.Generator().manual_seed(1)
    weight, x = torch.randn(8, 32, generator=g), torch.randn(3, 32, generator=g)
    spec = LinearSpec(
        in_features=32, out_features=8, act_dtype="float32", out_dtype="float32", scheme=SCHEMES["fp8"], max_tokens=3
    )
    kernel, host = ReferenceLinear(), SimpleNamespace(torch_device=torch.device("cpu"))
    y = kernel.apply(x, kernel.prepare({"weight": weight.clone()}, spec, host), None)
    torch.testing.assert_close(y, round_rows(x) @ round_rows(weight).T)
    exact = x @ weight.T
    assert 0.005 < (y - exact).norm() / exact.norm() < 0.06


def test_a_platform_without_the_kernel_serves_the_same_numbers(tmp_path: Path) -> None:
    model = str(make_model(tmp_path, tokenizer=False))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
    prompt = [5, 6, 7, 8, 9]
    scores = []
    for quantization in (None, "fp8", "int8", "int8_per_channel_weight_only", "int4"):
        with LLM(model, quantization=quantization, **OPTIONS) as llm:
            rows = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
            assert rows is not None
            scores.append(torch.tensor([row[token].logprob for row, token in zip(rows, prompt, strict=True) if row]))
    for other, most in zip(scores[1:], (0.3, 0.3, 0.3, 0.8), strict=True):
        assert 0 < (scores[0] - other).abs().max() < most


def test_other_methods_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    model = str(make_model(tmp_path, tokenizer=False))
    with pytest.raises(ConfigError, match=r"--quantization int3: .*known: none .*, fp8"):
        LLM(model, quantization="int3", **OPTIONS)
