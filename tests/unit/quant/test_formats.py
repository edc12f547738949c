"""Quantization configs find their registered format, or an error that names the method."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.plugin import QuantScheme
from octavo.quant.formats import QuantFormats
from octavo.quant.schemes import dequantize_weight


class Halves:
    """A format for the tests: everything but the head is int8."""

    name: ClassVar[str] = "halves"

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "halves"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.skip = config["skip"]

    def scheme(self, layer: str) -> QuantScheme | None:
        return None if layer in self.skip else QuantScheme(weight="int8", granularity="channel", packing="halves")


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> QuantFormats:
    module = types.ModuleType("octavo_test_halves")
    module.Halves = Halves  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo_test_halves", module)
    formats = QuantFormats()
    formats.add("halves", "octavo_test_halves:Halves")
    return formats


def test_a_registered_format_is_opened_with_the_checkpoints_config(formats: QuantFormats) -> None:
    opened = formats.open({"quant_method": "halves", "skip": ["lm_head"]})
    assert opened is not None
    assert opened.scheme("lm_head") is None
    scheme = opened.scheme("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert scheme.packing == "halves"


@pytest.mark.parametrize("config", [None, {}])
def test_an_unquantized_checkpoint_has_no_format(config: dict[str, Any] | None, formats: QuantFormats) -> None:
    assert formats.open(config) is None


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "'modelopt NVFP4'"),
        ({"quant_algo": "FP8"}, "'modelopt FP8'"),
        ({"bits": 4}, "'unknown'"),
    ],
)
def test_a_method_that_nobody_registered_is_named(config: dict[str, Any], method: str, formats: QuantFormats) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{method} is not supported \(known: halves\)"):
        formats.open(config)


def test_registering_twice_is_fine_for_the_same_class_only(formats: QuantFormats) -> None:
    formats.add("halves", "octavo_test_halves:Halves")
    with pytest.raises(ConfigError, match="'halves' is already registered as octavo_test_halves:Halves"):
        formats.add("halves", "another:Class")
    with pytest.raises(ConfigError, match="must look like 'package"):
        formats.add("quarters", "no colon")


def test_two_registries_do_not_share_their_formats(formats: QuantFormats) -> None:
    with pytest.raises(UnsupportedModelError, match="none for safetensors"):
        QuantFormats().open({"quant_method": "halves", "skip": []})


def test_a_packing_without_decoder_is_named() -> None:
    scheme = QuantScheme(weight="int8", packing="halves")
    with pytest.raises(UnsupportedModelError, match=r"packed as 'halves' cannot be decoded; known: gguf"):
        dequantize_weight({"weight": torch.zeros(1)}, scheme, torch.float32)
