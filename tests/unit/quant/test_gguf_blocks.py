"""Every GGUF block type decodes to the numbers that independent decoders give."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.gguf.dequant import GGML_NAME
from transformers.integrations.gguf.dequant import dequantize as transformers_dequantize

from octavo.errors import UnsupportedModelError
from octavo.plugin.torch import has_int4_groups, int4_groups
from octavo.quant import gguf_blocks
from octavo.quant.gguf_blocks import block_size, dequantize, scheme

WITH_QUANTIZER = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
KNOWN_TO_TRANSFORMERS = sorted(set(GGML_NAME.values()) & set(gguf_blocks.FORMATS))


def random_rows(qtype: str, *, num_rows: int = 12, seed: int = 1) -> torch.Tensor:
    """Packed rows of random bytes whose scales are finite: their exponents' high bits are cleared."""
    size = block_size(qtype)[1]
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (num_rows, 3 * size), dtype=np.uint8)
    return torch.from_numpy(rows & 0xBB)  # no 16-bit word, wherever a scale lies, is an infinity or a NaN


def test_all_types_that_gguf_decodes_are_known() -> None:
    decodable = {kind.name for kind in gguf.quants._type_traits if kind.name != "BF16"}
    assert set(gguf_blocks.FORMATS) == decodable


@pytest.mark.parametrize("qtype", WITH_QUANTIZER)
def test_quantized_weights_come_back_close_to_the_originals(qtype: str) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 512), dtype=np.float32)
    packed = torch.from_numpy(gguf.quantize(weight, gguf.GGMLQuantizationType[qtype]))
    error = dequantize(packed, qtype, torch.float32).numpy() - weight
    allowed = {"Q4_0": 0.15, "Q4_1": 0.12, "Q5_0": 0.08, "Q5_1": 0.06, "Q8_0": 0.01, "MXFP4": 0.25}
    assert np.sqrt(np.mean(error**2)) < allowed.get(qtype, 1.0)


@pytest.mark.parametrize("qtype", sorted(gguf_blocks.FORMATS))
def test_numbers_equal_those_of_the_gguf_package_bit_for_bit(qtype: str) -> None:
    packed = random_rows(qtype)
    expected = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType[qtype])
    assert np.isfinite(expected).all()
    assert torch.equal(dequantize(packed, qtype, torch.float32), torch.from_numpy(expected))


@pytest.mark.parametrize("qtype", sorted(gguf_blocks.FOUR_BIT))
def test_four_bit_types_come_as_codes_with_a_scale_and_an_offset_for_every_32_columns(qtype: str) -> None:
    packed = random_rows(qtype)
    assert has_int4_groups(scheme(qtype))
    codes, scale, offset = int4_groups({"weight": packed}, scheme(qtype))
    assert codes.dtype == torch.uint8
    assert 0 <= codes.min() < codes.max() <= 15
    groups = codes.view(*scale.shape, 32).float() * scale[..., None] + offset[..., None]
    assert torch.equal(groups.flatten(1), dequantize(packed, qtype, torch.float32))


def test_other_types_have_no_four_bit_codes() -> None:
    assert not has_int4_groups(scheme("Q6_K"))
    assert not has_int4_groups(None)


@pytest.mark.parametrize("qtype", KNOWN_TO_TRANSFORMERS)
def test_numbers_equal_those_of_transformers(qtype: str) -> None:
    packed = random_rows(qtype)
    kind = next(number for number, name in GGML_NAME.items() if name == qtype)
    expected = transformers_dequantize(packed.flatten(), kind, torch.float32)
    torch.testing.assert_close(dequantize(packed, qtype, torch.float32).flatten(), expected.flatten())


@pytest.mark.parametrize("qtype", ["Q4_0", "Q6_K"])
def test_chunks_of_rows_agree_with_the_whole(qtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_rows(qtype, num_rows=23)
    whole = dequantize(packed, qtype, torch.bfloat16)
    monkeypatch.setattr(gguf_blocks, "CHUNK_ELEMENTS", 5 * whole.shape[1])
    assert torch.equal(dequantize(packed, qtype, torch.bfloat16), whole)


def test_rounding_happens_once_from_float32() -> None:
    packed = random_rows("Q4_1")
    exact = dequantize(packed, "Q4_1", torch.float32)
    assert torch.equal(dequantize(packed, "Q4_1", torch.bfloat16), exact.bfloat16())


def test_stacked_matrices_and_empty_ones_keep_their_shape() -> None:
    packed = random_rows("Q8_0", num_rows=6).reshape(2, 3, -1)
    out = dequantize(packed, "Q8_0", torch.float32)
    assert out.shape == (2, 3, 96)
    assert torch.equal(out[1], dequantize(packed[1], "Q8_0", torch.float32))
    assert dequantize(packed[:0], "Q8_0", torch.float32).shape == (0, 3, 96)


def test_rows_cut_out_of_a_wider_matrix_decode_too() -> None:
    wide = random_rows("Q4_0")
    size = block_size("Q4_0")[1]
    assert torch.equal(
        dequantize(wide[:, size : 2 * size], "Q4_0", torch.float32), dequantize(wide, "Q4_0", torch.float32)[:, 32:64]
    )


def test_an_infinite_scale_is_passed_on_without_a_warning() -> None:
    packed = torch.zeros(1, block_size("Q6_K")[1], dtype=torch.uint8)
    packed[0, -2:] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    assert not dequantize(packed, "Q6_K", torch.float32).isfinite().all()


def test_the_scheme_says_what_a_kernel_needs_to_match() -> None:
    q4_1 = scheme("Q4_1")
    assert (q4_1.packing, q4_1.weight, q4_1.symmetric, q4_1.group) == ("gguf:Q4_1", "uint4", False, (1, 32))
    assert scheme("Q6_K").group == (1, 256)


def test_an_undecodable_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"type Q8_1 cannot be decoded; known: Q4_0"):
        scheme("Q8_1")
