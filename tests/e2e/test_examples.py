"""The examples of docs/examples serve, each with what it adds: kernels, a format, a communicator, a model, a parser."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from installed_examples import EXAMPLES, install, modules_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.config import make_config
from octavo.discovery import select
from octavo.errors import OctavoError
from octavo.extensions import load_extensions
from octavo.ops.bind import KernelTable
from octavo.plugin import AttentionSpec, BatchLimits, LinearSpec, MatrixSpec
from octavo.plugin.torch import TorchDevice
from octavo.server.parsers.events import Content, ToolCallArguments, ToolCallStart
from octavo.server.parsers.registry import choose, make_parser
from octavo.testing.tiny import make_model

NAMES = ("acme", "acme-full", "kernel-pack", "extension")
PROMPTS = [[17, 40, 3], list(range(20, 60)), [5] * 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kv_blocks": 32}
ATTENTION = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, dtype="float32", kv_dtype="float32", block_size=16
)
LIMITS = BatchLimits(max_num_tokens=64, max_num_seqs=4, max_model_len=96)


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All examples on the import path; gone again behind the last test."""
    folder = tmp_path_factory.mktemp("site")
    for name in NAMES:
        install(EXAMPLES / name, folder)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("ACME_DEVICE", os.devnull)
        patch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
        yield folder
    ours = set.union(*(modules_of(EXAMPLES / name) for name in NAMES))
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in ours:
            del sys.modules[module]


def answers(folder: Path, platform: str, **settings: Any) -> list[list[int]]:
    """Greedy tokens of the prompts."""
    with LLM(str(folder), platform=platform, skip_tokenizer_init=True, **SETTINGS | settings) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def chosen(platform: str, **forced: str) -> dict[str, str]:
    """What serves attention and linear layers, by kernel tables of the platform and its packs."""
    opened = select(platform)
    device, table = TorchDevice("cpu"), KernelTable(forced=forced)
    opened.register_kernels(table, device)
    assert table.broken_packs == []
    table.attention_backend(ATTENTION, LIMITS, device)
    return {choice.what: choice.provider for choice in table.choices}


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_kernels_in_c_give_the_tokens_of_the_references(tmp_path: Path, model_type: str) -> None:
    folder = make_model(tmp_path, model_type, seed=2, tokenizer=False)
    assert answers(folder, "acme_full") == answers(folder, "refdev")
    assert chosen("acme_full") == {"attention": "acme"}


def test_the_full_examples_drafter_guesses_and_changes_no_token(tmp_path: Path) -> None:
    folder = make_model(tmp_path, seed=2, tokenizer=False)
    # With two tokens to choose from, a period of two is often right.
    params = [
        SamplingParams(temperature=t, seed=1, allowed_token_ids=(5, 9), max_tokens=40, ignore_eos=True)
        for t in (0.0, 1.0, 0.0)
    ]
    answered = []
    for speculative in (None, {"method": "acme_period", "num_speculative_tokens": 4, "period": 2}):
        settings = SETTINGS | {"platform": "acme_full", "speculative_config": speculative}
        with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
            answered.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
            stats = llm.stats
    assert answered[0] == answered[1]
    assert 0 < sum(stats.spec_accepted) < stats.spec_draft_tokens


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "acme_period", "period": 0}, "'acme_period': period must be an integer of at least 1, not 0"),
        ({"method": "acme_period", "table": 1}, "'acme_period': it takes period alone, not table"),
        ({"method": "acme_perod"}, "no drafter has that name; known: acme_period, ngram"),
    ],
)
def test_a_drafter_that_cannot_be_made_ends_the_start_before_weights_are_read(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = make_model(tmp_path, seed=2, tokenizer=False)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(OctavoError, match=message):
        answers(folder, "acme_full", speculative_config=config | {"num_speculative_tokens": 2})


def coded(source: Path, target: Path) -> tuple[Path, Path]:
    """The model with its linear layers in 4 bits, as acme_groups has them, and as the numbers that these stand for."""
    from octavo_acme_full.quant import AcmeGroups, dequantize, quantize

    settings = {"quant_method": "acme_groups", "group_size": 32, "ignore": ["lm_head"]}
    shape = {"out_features": 32, "in_features": 32}
    layer = AcmeGroups(settings).layer(MatrixSpec(name="any", kind="linear", **shape))
    assert layer is not None
    made = []
    for name, keep in (("codes", True), ("numbers", False)):
        folder = target / name
        folder.mkdir()
        config = json.loads((source / "config.json").read_text())
        weights = load_file(source / "model.safetensors")
        for key in [key for key in weights if "_proj.weight" in key]:
            codes = quantize(weights.pop(key), 32)
            if keep:
                weights |= {key.replace("weight", suffix): tensor for suffix, tensor in codes.items()}
            else:
                weights[key] = dequantize(codes, layer.scheme, torch.float32)
        if keep:
            config["quantization_config"] = settings
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        made.append(folder)
    return made[0], made[1]


def test_a_checkpoint_in_the_full_examples_format_is_served_as_codes_by_its_kernel(tmp_path: Path) -> None:
    codes, numbers = coded(make_model(tmp_path / "plain", seed=3, tokenizer=False), tmp_path)
    tokens = answers(codes, "acme_full", require_native=("linear", "attention"))
    assert tokens == answers(numbers, "acme_full")
    assert tokens == answers(numbers, "refdev")


def test_other_platforms_serve_the_full_examples_format_by_its_dequantize(tmp_path: Path) -> None:
    codes, numbers = coded(make_model(tmp_path / "plain", seed=3, tokenizer=False), tmp_path)
    expected = answers(numbers, "refdev")
    assert answers(codes, "refdev") == expected
    assert answers(codes, "refdev", quantization="none") == expected
    assert answers(codes, "cpu", kernels={"linear": "reference"}) == expected
    assert answers(codes, "cpu", quantization="none") == answers(numbers, "cpu")


def test_a_platforms_four_bit_kernel_serves_the_full_examples_format_as_it_is() -> None:
    from octavo_acme_full.quant import AcmeGroups, dequantize, quantize

    native = pytest.importorskip("octavo_cpu.native")
    if why := native.why_not():
        pytest.skip(why)
    sizes = {"out_features": 64, "in_features": 256}
    layer = AcmeGroups({"group_size": 64}).layer(MatrixSpec(name="any", kind="linear", **sizes))
    assert layer is not None
    platform = select("cpu")
    device = platform.make_device(0, platform.configure(make_config(platform="cpu"))[0])
    table = KernelTable(forced={"linear": "int4_groups"})
    platform.register_kernels(table, device)
    spec = LinearSpec(act_dtype="float32", out_dtype="float32", scheme=layer.scheme, max_tokens=8, **sizes)
    kernel = table.linear_kernel(spec, device)
    tensors, x = quantize(torch.randn(64, 256), 64), torch.randn(5, 256)
    expected = x @ dequantize(tensors, layer.scheme, torch.float32).T
    found = kernel.apply(x, kernel.prepare(tensors, spec, device), None)
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["acme_full", "refdev", "cpu"])
def test_two_ranks_divide_every_tensor_of_the_full_examples_format(
    tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFDEV_VISIBLE", "")  # which rank 0 sets
    plain = make_model(tmp_path / "plain", seed=3, tokenizer=False, intermediate_size=128)
    codes, _ = coded(plain, tmp_path)
    assert answers(codes, platform, tensor_parallel_size=2) == answers(codes, platform)


def test_two_ranks_cannot_divide_groups_and_are_told_so(tmp_path: Path) -> None:
    codes, _ = coded(make_model(tmp_path / "plain", seed=3, tokenizer=False), tmp_path)
    with pytest.raises(OctavoError, match=r"down_proj\.weight_scale at input feature 48 cannot be cut"):
        answers(codes, "acme_full", tensor_parallel_size=2)


def test_codes_of_four_bits_are_the_nearest_and_survive_another_coding() -> None:
    from octavo_acme_full.quant import AcmeGroups, dequantize, int4_groups, quantize

    spec = MatrixSpec(name="model.layers.0.mlp.up_proj", kind="linear", out_features=64, in_features=128)
    layer = AcmeGroups({"group_size": 64}).layer(spec)
    assert layer is not None
    weight = torch.randn(64, 128) * 0.1
    tensors = quantize(weight, 64)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {n: k.shape for n, k in layer.tensors.items()}
    decoded = dequantize(tensors, layer.scheme, torch.float32)
    step = tensors["weight_scale"].float().repeat_interleave(64, 1)
    assert ((decoded - weight).abs() <= 0.51 * step).all()
    assert torch.equal(quantize(decoded, 64)["weight_packed"], tensors["weight_packed"])
    codes, scale, offset = int4_groups(tensors, layer.scheme)
    groups = codes.view(64, 4, 32).float() * scale[..., None] + offset[..., None]
    torch.testing.assert_close(groups.flatten(1), decoded, atol=1e-6, rtol=1e-5)


def test_what_the_full_examples_format_cannot_hold_is_refused() -> None:
    from octavo_acme_full.quant import AcmeGroups

    with pytest.raises(ValueError, match="group_size must be an even number, not 3"):
        AcmeGroups({"group_size": 3})
    odd = MatrixSpec(name="x", kind="linear", out_features=4, in_features=48)
    with pytest.raises(ValueError, match="48 columns are no whole groups of 32"):
        AcmeGroups({}).layer(odd)
    embedding = MatrixSpec(name="x", kind="embedding", out_features=4, in_features=64)
    assert AcmeGroups({}).layer(embedding) is None


@pytest.mark.slow
def test_two_ranks_of_the_full_example_give_the_tokens_of_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path, seed=4, tokenizer=False)
    assert answers(folder, "acme_full", tensor_parallel_size=2) == answers(folder, "acme_full")


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_the_packs_attention_serves_a_platform_that_somebody_else_brings(tmp_path: Path, model_type: str) -> None:
    folder = make_model(tmp_path, model_type, seed=5, tokenizer=False)
    expected = answers(folder, "refdev")
    assert answers(folder, "acme") == expected
    assert answers(folder, "cpu", attention_backend="sdpa") == expected


def test_the_pack_is_asked_before_the_reference_and_only_where_it_belongs() -> None:
    assert chosen("acme") == {"attention": "sdpa"}
    assert chosen("cpu")["attention"] != "sdpa"
    assert chosen("cpu", attention="sdpa") == {"attention": "sdpa"}
    assert chosen("refdev") == {"attention": "refdev"}
    with pytest.raises(OctavoError, match="no attention kernel"):
        chosen("refdev", attention="sdpa")


def test_the_extensions_model_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "attention_out_bias": True, "head_dim": 24}
    folder = make_model(tmp_path, "seed_oss", seed=6, tokenizer=False, **biases)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(20):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    for platform in ("refdev", "cpu", "acme_full"):
        assert answers(folder, platform) == expected


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


def test_the_extensions_parser_reads_calls_however_they_are_split() -> None:
    bracket = choose(load_extensions(), tool_call_parser="bracket", reasoning_parser="none")
    text = 'Let me look. [call weather]{"city": "Paris"}[/call]\n[call weather]{"city": "Rome"}[/call]'
    for size in (1, 3, len(text)):
        parser = make_parser(bracket, tools=[Tool("weather")])
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert "".join(e.text for e in events if isinstance(e, Content)).strip() == "Let me look."
        assert [e.name for e in events if isinstance(e, ToolCallStart)] == ["weather", "weather"]
        arguments = [
            "".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == i) for i in (0, 1)
        ]
        assert [json.loads(a) for a in arguments] == [{"city": "Paris"}, {"city": "Rome"}]


@pytest.mark.parametrize(
    ("page", "module"),
    [("kernel-packs.md", "kernel-pack/octavo_sdpa.py"), ("extensions.md", "extension/octavo_seed.py")],
)
def test_what_the_docs_show_is_the_example(page: str, module: str) -> None:
    text = (EXAMPLES.parent / page).read_text()
    assert f"```python\n{(EXAMPLES / module).read_text()}```" in text
    project = (EXAMPLES / module).with_name("pyproject.toml").read_text()
    group = project[project.index("[project.entry-points") :].split("\n\n")[0]
    assert f"```toml\n{group}\n```" in text
