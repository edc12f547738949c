"""Own config classes are Transformers', without what importing those costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from octavo.weights.config_classes import OWN, config_class
from octavo.weights.source import open_model

LLAMA_3 = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "eos_token_id": [128001, 128009],
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("values", [{}, {"num_attention_heads": 16, "head_dim": 80}, LLAMA_3])
@pytest.mark.parametrize("model_type", sorted(OWN))
def test_own_class_has_the_fields_of_transformers(model_type: str, values: dict[str, Any]) -> None:
    theirs, ours = CONFIG_MAPPING[model_type](**values), config_class(model_type)(**values)
    assert type(ours) is not type(theirs)
    assert ours.to_dict() == theirs.to_dict()


@pytest.mark.parametrize("wrong", [{"hidden_size": 100, "num_attention_heads": 3}, {"vocab_size": "many"}])
def test_own_class_refuses_what_transformers_refuses(wrong: dict[str, Any]) -> None:
    for model_class in (CONFIG_MAPPING["llama"], OWN["llama"]):
        with pytest.raises(StrictDataclassError):
            model_class(**wrong)


def test_other_types_are_transformers_own_and_unknown_ones_an_error() -> None:
    assert config_class("qwen3") is CONFIG_MAPPING["qwen3"]
    with pytest.raises(KeyError):
        config_class("no-such-model")


def test_config_with_its_own_code_is_asked_for_that(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "own_config.OwnConfig"}})
    )
    (tmp_path / "own_config.py").write_text(
        "from transformers import PretrainedConfig\n\n\nclass OwnConfig(PretrainedConfig):\n"
        "    model_type = 'llama'\n    own_setting: int = 7\n"
    )
    own = open_model(tmp_path, load_format="dummy", trust_remote_code=True)
    assert own.config.own_setting == 7
    assert not hasattr(open_model(tmp_path, load_format="dummy").config, "own_setting")


def test_finding_a_llama_imports_neither_layers_nor_compilers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | LLAMA_3))
    code = f"""
import sys
from octavo.weights.source import open_model
assert open_model({str(tmp_path)!r}, load_format="dummy").config.head_dim == 128
heavy = {{"transformers.activations", "transformers.modeling_utils", "torch.distributed.fsdp", "sympy", "torchvision",
         "torch._dynamo", "torch._inductor"}}
print(sorted(heavy & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
