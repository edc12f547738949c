"""`--quantization fp8` on a plain checkpoint: a kernel is asked to quantize; a platform without one still serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.quant.online import SCHEMES, is_plain, scheme_of
from octavo.testing.tiny import make_model

OPTIONS = {"platform": "cpu", "dtype": "float32", "max_model_len": 64, "num_kv_blocks": 32, "skip_tokenizer_init": True}


def test_linear_layers_are_asked_for_in_fp8_and_the_vocabulary_is_not() -> None:
    scheme = scheme_of("fp8")
    assert scheme("model.layers.0.mlp.down_proj") == SCHEMES["fp8"]
    assert scheme("lm_head") is None
    assert scheme("model.embed_tokens") is None
    assert is_plain(None)
    assert is_plain(SCHEMES["fp8"])


def test_a_platform_without_the_kernel_multiplies_the_plain_weight(tmp_path: Path) -> None:
    model = str(make_model(tmp_path, tokenizer=False))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    tokens = []
    for quantization in (None, "fp8"):
        with LLM(model, quantization=quantization, **OPTIONS) as llm:
            tokens.append(list(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids))
    assert tokens[0] == tokens[1]


def test_other_methods_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    model = str(make_model(tmp_path, tokenizer=False))
    with pytest.raises(ConfigError, match=r"--quantization int3: .*known: none .*, fp8"):
        LLM(model, quantization="int3", **OPTIONS)
