"""The door carries the layouts of common public 4-bit checkpoints, though core does not bring these formats yet."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.plugin import Along, ExtensionRegistry, MatrixSpec, QuantLayer, QuantScheme, QuantTensor, hookimpl
from octavo.testing.tiny import make_model

Tensor = torch.Tensor
GROUP = 32
SHIFTS = torch.arange(0, 32, 4)
"""Of the eight codes in a 32-bit word."""


def words_of(codes: Tensor) -> Tensor:
    """Codes 0..15 [R, C] -> int32 [R, C / 8]."""
    return (codes.long().unflatten(1, (-1, 8)) << SHIFTS).sum(-1).to(torch.int32)


def codes_of(words: Tensor) -> Tensor:
    """The reverse of `words_of`."""
    return (words.unsqueeze(-1) >> SHIFTS & 15).flatten(1).float()


class PackQuantized:
    """compressed-tensors, format "pack-quantized", 4 bits in groups, symmetric."""

    name: ClassVar[str] = "pack-quantized"
    config: ClassVar[dict[str, Any]] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("format") == cls.name

    def __init__(self, config: Mapping[str, Any]) -> None: ...

    def layer(self, spec: MatrixSpec) -> QuantLayer | None:
        if spec.kind != "linear":
            return None
        n, k, rows = spec.out_features, spec.in_features, Along(dim=0)
        packed = QuantTensor(shape=(n, k // 8), dtype="int32", rows=rows, columns=Along(dim=1, features=8))
        scale = QuantTensor(shape=(n, k // GROUP), dtype="float16", rows=rows, columns=Along(dim=1, features=GROUP))
        return QuantLayer(
            scheme=QuantScheme(weight="int4", packing=f"{self.name}:{GROUP}", dequantize=self.dequantize),
            tensors={"weight_packed": packed, "weight_scale": scale},
            unused=("weight_shape",),
        )

    @staticmethod
    def dequantize(weights: Mapping[str, Tensor], scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
        scale = weights["weight_scale"].float().repeat_interleave(GROUP, 1)
        return ((codes_of(weights["weight_packed"]) - 8) * scale).to(dtype)

    @staticmethod
    def pack(codes: Tensor, zeros: Tensor, scale: Tensor) -> dict[str, Tensor]:
        shape = torch.tensor(codes.shape)
        return {"weight_packed": words_of(codes), "weight_scale": scale, "weight_shape": shape}


class Gptq:
    """GPTQ, 4 bits, groups in order: everything lies the other way round, zeros are packed too, and one too small."""

    name: ClassVar[str] = "gptq"
    config: ClassVar[dict[str, Any]] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}

    @classmethod
    def detect(cls, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == cls.name

    def __init__(self, config: Mapping[str, Any]) -> None: ...

    def layer(self, spec: MatrixSpec) -> QuantLayer | None:
        if spec.kind != "linear":
            return None
        n, k, rows, groups = spec.out_features, spec.in_features, Along(dim=1), Along(dim=0, features=GROUP)
        return QuantLayer(
            scheme=QuantScheme(
                weight="uint4", symmetric=False, packing=f"{self.name}:{GROUP}", dequantize=self.dequantize
            ),
            tensors={
                "qweight": QuantTensor(shape=(k // 8, n), dtype="int32", rows=rows, columns=Along(dim=0, features=8)),
                "qzeros": QuantTensor(
                    shape=(k // GROUP, n // 8), dtype="int32", rows=Along(dim=1, features=8), columns=groups
                ),
                "scales": QuantTensor(shape=(k // GROUP, n), dtype="float16", rows=rows, columns=groups),
            },
            unused=("g_idx",),
        )

    @staticmethod
    def dequantize(weights: Mapping[str, Tensor], scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
        codes, zeros = codes_of(weights["qweight"].T), (codes_of(weights["qzeros"]) + 1).T
        zeros, scale = (t.repeat_interleave(GROUP, 1) for t in (zeros, weights["scales"].float().T))
        return ((codes - zeros) * scale).to(dtype)

    @staticmethod
    def pack(codes: Tensor, zeros: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {
            "qweight": words_of(codes).T.contiguous(),
            "qzeros": words_of(zeros.T - 1),
            "scales": scale.T.contiguous(),
            "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // GROUP,
        }


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both formats, as an extension would bring them."""
    module: Any = types.ModuleType("public_layouts")
    module.PackQuantized, module.Gptq = PackQuantized, Gptq

    @hookimpl
    def register_extensions(registry: ExtensionRegistry) -> None:
        for cls in (PackQuantized, Gptq):
            registry.quant_format(cls.name, f"public_layouts:{cls.__name__}")

    module.register_extensions = register_extensions
    monkeypatch.setitem(sys.modules, "public_layouts", module)
    entry = EntryPoint(name="layouts", value="public_layouts", group="octavo.extensions")
    monkeypatch.setattr("octavo.active_platform.entry_points", lambda group: [entry] if group == entry.group else [])
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")


def answer(folder: Path) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    settings = {"max_model_len": 64, "num_kv_blocks": 16, "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(folder), platform="refdev", **settings) as llm:
        outputs = llm.generate([[17, 40, 3], list(range(20, 50))], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("cls", [PackQuantized, Gptq])
def test_a_checkpoint_in_this_layout_gives_the_tokens_of_its_numbers(cls: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=7, tokenizer=False)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    numbers = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        n, k = weights[name].shape
        codes = torch.randint(0, 16, (n, k), generator=generator)
        zeros = torch.full((n, k // GROUP), 8)
        if cls is Gptq:
            zeros = torch.randint(6, 11, zeros.shape, generator=generator)
        scale = (torch.rand(zeros.shape, generator=generator) * 0.02 + 0.01).half()
        numbers[name] = (codes - zeros.repeat_interleave(GROUP, 1)) * scale.float().repeat_interleave(GROUP, 1)
        del weights[name]
        packed = cls.pack(codes, zeros, scale)
        weights |= {name.replace("weight", suffix, 1): tensor for suffix, tensor in packed.items()}
    save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})
    expected = answer(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": cls.config}))
    assert answer(folder) == expected
