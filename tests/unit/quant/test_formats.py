"""Quantization configs find their registered format, or an error that names the method."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.extensions import load_extensions
from octavo.plugin import MatrixSpec, QuantLayer, QuantScheme, QuantTensor
from octavo.plugin.torch import core_scheme, dequantize_weight
from octavo.quant.formats import layers_of

HALVES = {"quant_method": "halves", "skip": ["lm_head"]}


class Halves:
    """A format for the tests: everything but what the config says is int8."""

    name: ClassVar[str] = "halves"

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") in ("halves", "online") and config.get("method") != "int3"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.skip = config.get("skip", ())
        if "bits" in config:
            raise ValueError("bits must not be there")

    def layer(self, spec: MatrixSpec) -> QuantLayer | None:
        if spec.name in self.skip:
            return None
        if spec.in_features % 2:
            raise ValueError(f"{spec.in_features} input features cannot be halved")
        scheme = QuantScheme(weight="int8", granularity="channel", packing="halves")
        return QuantLayer(scheme=scheme, tensors={"half": QuantTensor(shape=(2, 3), dtype="int8")})


class Older:
    """As a format looked before formats said which tensors they want."""

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return True

    def scheme(self, layer: str) -> None: ...


def matrix(name: str, in_features: int = 4) -> MatrixSpec:
    return MatrixSpec(name=name, kind="linear", out_features=2, in_features=in_features)


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    module = types.ModuleType("octavo_test_halves")
    module.Halves, module.Older = Halves, Older  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo_test_halves", module)
    return {"halves": "octavo_test_halves:Halves"}


def test_a_registered_format_is_asked_for_every_matrix(formats: dict[str, str]) -> None:
    layers = layers_of(formats, HALVES)
    assert layers(matrix("lm_head")) is None
    found = layers(matrix("model.layers.0.mlp.up_proj"))
    assert found is not None
    assert found.scheme.packing == "halves"


@pytest.mark.parametrize("config", [None, {}])
def test_an_unquantized_checkpoint_is_plain(config: dict[str, Any] | None, formats: dict[str, str]) -> None:
    assert layers_of(formats, config)(matrix("x")) is None


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "'modelopt NVFP4'"),
        ({"quant_algo": "FP8"}, "'modelopt FP8'"),
        ({"bits": 4}, "'unknown'"),
    ],
)
def test_a_method_that_nobody_registered_is_named(config: dict[str, Any], method: str, formats: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{method} is not supported \(known: halves\)"):
        layers_of(formats, config)


def test_what_a_format_cannot_serve_is_named_with_the_format(formats: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"format 'halves': this checkpoint's config: .*bits must not"):
        layers_of(formats, HALVES | {"bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"format 'halves': model\.x: .*3 input features cannot be halved"):
        layers_of(formats, HALVES)(matrix("model.x", in_features=3))


@pytest.mark.usefixtures("formats")
def test_a_format_of_an_older_api_is_named_and_not_asked() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'older' \(octavo_test_halves:Older\) has no method `layer`"):
        layers_of({"older": "octavo_test_halves:Older"}, HALVES)


def test_a_format_may_quantize_a_plain_checkpoint_that_is_asked_for(formats: dict[str, str]) -> None:
    found = layers_of(formats, None, "halved")(matrix("x"))
    assert found is not None
    assert found.scheme.packing == "halves"
    with pytest.raises(ConfigError, match=r"--quantization int3: not known; known: none .*, fp8"):
        layers_of(formats, None, "int3")
    with pytest.raises(ConfigError, match=r"--quantization fp8: the checkpoint is quantized already"):
        layers_of(formats, HALVES, "fp8")


def test_cores_own_formats_come_in_by_the_same_door() -> None:
    registered = load_extensions().quant_formats
    gguf = layers_of(registered, {"quant_method": "gguf", "types": {"x": "Q4_0"}})
    found = gguf(MatrixSpec(name="x", kind="embedding", out_features=6, in_features=64))
    assert found is not None
    assert found.scheme == core_scheme("gguf:Q4_0")
    assert found.tensors["weight"].shape == (6, 36)
    assert gguf(matrix("y")) is None
    online = layers_of(registered, None, "int8")(matrix("x"))
    assert online is not None
    assert online.scheme == core_scheme("online:int8")


def test_a_scheme_without_dequantize_is_named() -> None:
    scheme = QuantScheme(weight="int8", packing="halves")
    with pytest.raises(UnsupportedModelError, match=r"packed as 'halves' can only be served by a kernel for them"):
        dequantize_weight({"weight": torch.zeros(1)}, scheme, torch.float32)


def test_a_packing_that_is_not_cores_has_no_scheme_here() -> None:
    with pytest.raises(UnsupportedModelError, match="halves"):
        core_scheme("halves")
