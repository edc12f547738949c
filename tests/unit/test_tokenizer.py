"""Tokenizers of model folders: round trips, bytes of tokens, BOS and EOS, errors that name files."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from octavo.errors import CheckpointError, ConfigError, ModelNotFoundError, RequestError
from octavo.testing.tiny import DEFAULT, TEXT, make_model, make_tokenizer
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.tokenizer_backends import FastBackend, SlowBackend

BYTE_TOKENS = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
PIECES = ["▁", "▁he", "he", "llo", "l", "o", "h", "e", "▁hello", "▁▁"]


def sentencepiece_like(*, space_prefix: bool) -> tokenizers.Tokenizer:
    """A small vocabulary of the Llama 2 (space_prefix) or Gemma kind: metaspace and byte fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | BYTE_TOKENS
    vocab |= {piece: 259 + i for i, piece in enumerate(PIECES)}
    merges = [("h", "e"), ("▁", "he"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def kinds(tiny: Tokenizer) -> dict[str, Tokenizer]:
    """One tokenizer of each kind that decodes by bytes."""
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    return {
        "byte-level": tiny,
        "llama": Tokenizer(FastBackend(sentencepiece_like(space_prefix=True)), special_tokens=roles),
        "gemma": Tokenizer(FastBackend(sentencepiece_like(space_prefix=False)), special_tokens=roles),
    }


@given(st.text(max_size=60), st.sampled_from(["byte-level", "llama", "gemma"]))
def test_any_text_comes_back(kinds: dict[str, Tokenizer], text: str, kind: str) -> None:
    tokenizer = kinds[kind]
    text = text.replace("▁", "_")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@settings(max_examples=200)
@given(st.lists(st.integers(-1, 400), max_size=40), st.sampled_from(["byte-level", "llama", "gemma"]), st.booleans())
def test_streams_of_any_ids_give_the_text_of_all(
    kinds: dict[str, Tokenizer], ids: list[int], kind: str, skip: bool
) -> None:
    tokenizer = kinds[kind]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    streamed = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30), st.sampled_from(["byte-level", "llama", "gemma"]))
def test_decoding_agrees_with_the_library_on_well_formed_text(
    kinds: dict[str, Tokenizer], text: str, kind: str
) -> None:
    ids = kinds[kind].encode(text)
    library: Any = kinds[kind]._backend
    assert kinds[kind].decode(ids) == library._tokenizer.decode(ids)


@given(st.text(max_size=30))
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(kinds: dict[str, Tokenizer], text: str) -> None:
    for kind in ("byte-level", "gemma"):
        text = text.replace("▁", "_")
        tokenizer = kinds[kind]
        assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()


def test_byte_tokens_have_their_true_bytes(kinds: dict[str, Tokenizer]) -> None:
    llama = kinds["llama"]
    ids = llama.encode("“")
    assert [llama.token_bytes(i) for i in ids] == [b" ", b"\xe2", b"\x80", b"\x9c"]
    assert [llama.token_text(i) for i in ids] == [" ", "\ufffd", "\ufffd", "\ufffd"]


def test_special_tokens_have_their_text_and_are_skipped_on_demand(tiny: Tokenizer) -> None:
    ids = tiny.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tiny.token_bytes(1) == b"<|im_start|>"
    assert tiny.decode(ids) == "a"
    assert tiny.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert tiny.special_ids == {0, 1, 2}


def test_a_special_token_after_half_a_character_does_not_join_it(tiny: Tokenizer) -> None:
    half = tiny.encode("é")[:1]
    assert tiny.decode([*half, 2], skip_special_tokens=False) == "\ufffd<|im_end|>"
    assert tiny.decode([*half, 2]) == "\ufffd"


def test_ids_outside_the_vocabulary_have_no_text(tiny: Tokenizer) -> None:
    assert tiny.vocab_size == 384
    assert tiny.decode([384, -1, 10**12]) == ""
    assert tiny.token_bytes(384) == b""


def test_importing_the_tokenizer_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, octavo.tokenizer; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_lone_surrogates_are_refused(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2") as caught:
        tiny.encode("ab\ud800")
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError) as caught:
        tiny.encode_chat([{"role": "user", "content": "\udc00"}])
    assert caught.value.field == "messages"


def make(folder: Path, **changes: Any) -> Path:
    """A tiny tokenizer with BOS whose tokenizer_config.json has `changes`; None removes a key."""
    make_tokenizer(folder, bos=True)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return folder


CHAT = "/v1/chat/completions"


@pytest.mark.anyio
async def test_case_E4_bos_comes_once_when_template_and_tokenizer_both_add_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, serve: Any
) -> None:
    tokenizer = load_tokenizer(make(tmp_path, chat_template="{{ bos_token }}" + DEFAULT))
    messages = [{"role": "user", "content": "hi"}]
    plain = tokenizer.encode_chat(messages)
    assert plain[:2] == [0, 1]
    assert tokenizer.encode_chat(messages, add_special_tokens=True) == plain
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode(tokenizer.render_chat(messages)) == plain
        tokenizer.encode(tokenizer.render_chat(messages))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    server = await serve("yes", tokenizer=tokenizer)
    body = {"messages": messages, "return_token_ids": True}
    assert (await server.both(CHAT, body))["prompt_token_ids"] == plain
    assert (await server.both(CHAT, body | {"add_special_tokens": True}))["prompt_token_ids"] == plain
    body = {"prompt": tokenizer.render_chat(messages), "return_token_ids": True}
    assert (await server.both("/v1/completions", body))["choices"][0]["prompt_token_ids"] == plain


def test_the_models_own_description_of_its_answers_is_read(tmp_path: Path) -> None:
    described = {"start_anchor": "<bot>", "fields": {"content": {}}}
    assert load_tokenizer(make(tmp_path / "a", response_template=described)).response_template == described
    assert load_tokenizer(make(tmp_path / "b", response_template="odd")).response_template is None


@pytest.mark.anyio
async def test_case_E5_bos_is_added_on_demand_when_the_template_lacks_it(tmp_path: Path, serve: Any) -> None:
    tokenizer = load_tokenizer(make(tmp_path))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.encode_chat(messages)[:1] == [1]
    with_bos = tokenizer.encode_chat(messages, add_special_tokens=True)
    assert with_bos[:2] == [0, 1]
    server = await serve("yes", tokenizer=tokenizer)
    body = {"messages": messages, "return_token_ids": True}
    assert (await server.both(CHAT, body))["prompt_token_ids"] == with_bos[1:]
    assert (await server.both(CHAT, body | {"add_special_tokens": True}))["prompt_token_ids"] == with_bos


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("flag", [True, False])
def test_tokenizer_json_decides_what_is_added_around_a_text(tmp_path: Path, flag: bool, name: str) -> None:
    fast = sentencepiece_like(space_prefix=True)
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": flag}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.adds_bos
    assert tokenizer.encode("hello")[-1:] == [2]
    assert tokenizer.encode("hello") == AutoTokenizer.from_pretrained(tmp_path).encode("hello")


def test_tokens_named_only_in_the_config_are_special(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make(tmp_path, eos_token={"content": "Ġthe"}))
    the = tokenizer.eos_token_ids[0]
    assert the in tokenizer.special_ids
    assert tokenizer.decode([the]) == ""


def test_without_a_template_the_error_says_how_to_give_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make(tmp_path, chat_template=None))
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="--chat-template"):
        tokenizer.render_chat(messages)
    assert tokenizer.render_chat(messages, template="{{ bos_token }}{{ messages[0].content }}") == "<|bos|>hi"


def test_template_files_win_over_the_config(tmp_path: Path) -> None:
    make(tmp_path, chat_template=[{"name": "default", "template": "old"}, {"name": "rag", "template": "rag"}])
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.templates == {"default": "new", "rag": "rag", "tool_use": "tools"}


def test_operators_template_is_a_file_or_its_source(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "mine.jinja").write_text("mine")
    for value in (str(tmp_path / "mine.jinja"), "{{ 'mine' }}"):
        tokenizer = load_tokenizer(tmp_path, chat_template=value)
        assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "mine"
    for value in ("/no/such/file", "{% if %}"):
        with pytest.raises(ConfigError, match="chat_template"):
            load_tokenizer(tmp_path, chat_template=value)


@pytest.mark.anyio
async def test_case_H3_folder_without_a_tokenizer_names_what_was_looked_for(tmp_path: Path, serve_model: Any) -> None:
    folder = make_model(tmp_path / "model", "llama", tokenizer=False)
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json.*tokenizer\.model.*--skip-tokenizer-init"):
        await serve_model(folder)
    server = await serve_model(folder, skip_tokenizer_init=True)
    body = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    assert (await server.both("/v1/completions", body))["choices"][0]["token_ids"]
    response = await server.send("/v1/completions", {"prompt": "text"})
    assert (response.status_code, "tokenizer" in response.json()["error"]["message"]) == (400, True)


@pytest.mark.anyio
async def test_case_H3_tokenizer_json_alone_is_enough(tmp_path: Path, serve: Any) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (None, (), None)
    server = await serve("yes", tokenizer=tokenizer)
    answer = await server.both("/v1/completions", {"prompt": "hello", "echo": True})
    assert answer["choices"][0]["text"] == "helloyes"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_corrupt_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode("a long text " * 9)) == "a long text " * 9
    assert len(loaded.encode("!")) == 1


def test_wordpiece_decodes_through_its_neighbours() -> None:
    vocab = {"[UNK]": 0, "un": 1, "##believ": 2, "##able": 3, "story": 4}
    fast = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(FastBackend(fast))
    ids = tokenizer.encode("unbelievable story")
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([i]) for i in ids] == ["un", "believ", "able", " story"]
    assert tokenizer.decode(ids) == "unbelievable story"
    assert tokenizer.token_bytes(2) == b"##believ"


def test_a_tokenizer_in_python_gives_what_the_fast_one_gives(tiny: Tokenizer, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    slow = Tokenizer(SlowBackend(AutoTokenizer.from_pretrained(tmp_path)), special_tokens=tiny.special_tokens)
    text = "Die Bögen 你好 <|im_end|>"
    assert slow.encode(text) == tiny.encode(text)
    assert slow.decode(slow.encode(text)) == tiny.decode(tiny.encode(text))
    assert (slow.vocab_size, slow.eos_token_ids, slow.special_ids >= {2}) == (384, (2,), True)


@pytest.mark.parametrize("name", ["", "no/such-repository", "/no/such/folder", "not a name"])
def test_unknown_sources_are_not_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError):
        load_tokenizer(name)


@pytest.mark.anyio
@pytest.mark.parametrize("settings_file", [True, False])
async def test_case_H3_sentencepiece_model_alone_is_enough(tmp_path: Path, settings_file: bool, serve: Any) -> None:
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    if settings_file:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in ("The printer set the letters by hand.", "two  spaces 你好\n"):
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (500, 1, (2,))
    server = await serve(" by hand.", tokenizer=tokenizer, vocab_size=500)
    answer = await server.both("/v1/completions", {"prompt": "set", "echo": True})
    assert answer["choices"][0]["text"].endswith("by hand.")
