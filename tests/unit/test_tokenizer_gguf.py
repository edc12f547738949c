"""Tokenizers inside GGUF files: hand-made vocabularies, corrupt files, two real models."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.gguf_tokenizer import SPLITS
from octavo.testing.real_models import gemma3_gguf, smollm2_gguf
from octavo.testing.tiny import DEFAULT
from octavo.token_bytes import ALPHABET
from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.gguf_header import read_header

SPELL = {byte: char for char, byte in ALPHABET.items()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_vocab() -> tuple[list[str], list[int], list[str]]:
    """Tokens, kinds and merges of a small byte-level vocabulary; `<bos>` is 0, `<eos>` 1, `<eot>` 2."""
    tokens = ["<bos>", "<eos>", "<eot>", "<think>", *(SPELL[byte] for byte in range(256))]
    kinds = [CONTROL, CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * 256]
    merges = ["1 2", "h e", "Ġ he", "l l", "Ġ Ġ"]
    tokens += [merge.replace(" ", "") for merge in merges]
    return tokens, kinds + [NORMAL] * len(merges), merges


def sentencepiece_vocab() -> tuple[list[str], list[int], list[float]]:
    """Tokens, kinds and scores of a small sentencepiece vocabulary; `<s>` is 1, `</s>` 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces = ["he", "▁t", "▁the", "ll", "▁hell", "▁he", "llo", "▁hello", *"▁thelo"]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
    return tokens + pieces, kinds + [NORMAL] * len(pieces), scores


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file with one small vocabulary. Keys given as None are left out."""

    def make(model: str = "gpt2", **changes: Any) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        keys: dict[str, Any] = {"model": model, "bos_token_id": 0, "eos_token_id": 1}
        if model == "llama":
            tokens, kinds, scores = sentencepiece_vocab()
            keys |= {"tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
        else:
            tokens, kinds, merges = byte_level_vocab()
            keys |= {"tokens": tokens, "token_type": kinds, "merges": merges, "pre": "gpt-2"}
        template = changes.pop("chat_template", None)
        for key, value in (keys | changes).items():
            name = f"tokenizer.ggml.{key}"
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif value is not None:
                writer.add_array(name, value)
        if template is not None:
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return make


def test_byte_level_vocabulary_merges_and_keeps_added_tokens_whole(write: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(write())
    tokens = byte_level_vocab()[0]
    ids = tokenizer.encode("<bos> he<think>é12<eot>")
    expected = ["<bos>", "Ġhe", "<think>", SPELL[0xC3], SPELL[0xA9], "12", "<eot>"]
    assert [tokens[i] for i in ids] == expected
    assert tokenizer.decode(ids) == " he<think>é12"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == len(tokens)


@pytest.mark.parametrize(("pre", "num_tokens"), [("gpt-2", 1), ("smollm", 2), ("llama-bpe", 1), ("qwen2", 2)])
def test_pre_tokenizer_decides_whether_digits_are_joined(write: Callable[..., Path], pre: str, num_tokens: int) -> None:
    ids = load_tokenizer(write(pre=pre, add_bos_token=False)).encode("12")
    assert len(ids) == num_tokens


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_expression_covers_all_text(write: Callable[..., Path], pre: str) -> None:
    tokenizer = load_tokenizer(write(pre=pre, add_bos_token=False))
    text = "Hello, WORLD's  12345\n\n\tdon't ÀÉ été 你好 👍🏽 \r\n $x_1/y "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_vocabulary_merges_by_score_with_byte_fallback(write: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(write("llama", add_bos_token=False))
    tokens = sentencepiece_vocab()[0]
    # "he" (best score) is joined first, so "the" is "▁t"+"he"; "▁hello" is reached through "▁he"+"llo".
    assert [tokens[i] for i in tokenizer.encode("the hello é")] == ["▁the", "▁hello", "▁", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("prefix", [True, False])
def test_space_prefix_is_added_and_taken_away_by_the_flag(write: Callable[..., Path], prefix: bool) -> None:
    tokenizer = load_tokenizer(write("llama", add_space_prefix=prefix, add_bos_token=False))
    tokens = sentencepiece_vocab()[0]
    assert [tokens[i] for i in tokenizer.encode("he")] == ["▁he" if prefix else "he"]
    for text in ("he", " he", "  he", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


async def chat_prompt(serve: Any, tokenizer: Tokenizer, **body: Any) -> list[int]:
    """The token ids that a server makes of a conversation."""
    server = await serve([40, 41, 2], tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    answer = await server.both(CHAT, {"messages": MESSAGES, "return_token_ids": True, **body})
    ids: list[int] = answer["prompt_token_ids"]
    return ids


@pytest.mark.anyio
@pytest.mark.parametrize("template", [DEFAULT, None])
async def test_case_H7_chat_template_of_the_file_is_used(
    write: Callable[..., Path], template: str | None, serve: Any
) -> None:
    tokenizer = load_tokenizer(write(chat_template=template))
    if template is None:
        assert tokenizer.chat_template is None
        server = await serve([40, 2], tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
        assert "--chat-template" in await server.refused(CHAT, {"messages": MESSAGES}, field="messages")
        tokenizer = load_tokenizer(write(), chat_template="{{ messages[0].content }}")
        assert tokenizer.decode(await chat_prompt(serve, tokenizer)) == "hello"
    else:
        assert await chat_prompt(serve, tokenizer) == tokenizer.encode_chat(MESSAGES)
        text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("model", "changes", "begins_with_bos"),
    [
        ("gpt2", {"bos_token_id": None, "add_bos_token": True}, False),
        ("gpt2", {}, False),
        ("gpt2", {"add_bos_token": True}, True),
        ("gpt2", {"add_bos_token": False}, False),
        ("gpt2", {"pre": "llama-bpe"}, True),
        ("llama", {"bos_token_id": None}, False),
        ("llama", {}, True),
        ("llama", {"add_bos_token": False}, False),
    ],
)
async def test_case_H8_bos_is_added_by_the_flag_and_never_guessed(
    write: Callable[..., Path], model: str, changes: dict[str, Any], begins_with_bos: bool, serve: Any
) -> None:
    tokenizer = load_tokenizer(write(model, **changes))
    assert (tokenizer.bos_token_id is None) == ("bos_token_id" in changes)
    ids = tokenizer.encode("hello")
    assert (ids[0] == tokenizer.bos_token_id) is begins_with_bos
    if begins_with_bos:
        assert ids[1] != tokenizer.bos_token_id
    server = await serve([40, 41, 2], tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    answer = await server.both("/v1/completions", {"prompt": "hello", "return_token_ids": True})
    assert answer["choices"][0]["prompt_token_ids"] == ids


@pytest.mark.anyio
@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
async def test_case_H8_chat_has_the_bos_of_its_template_and_no_other(
    write: Callable[..., Path], add_bos: bool, in_template: bool, serve: Any
) -> None:
    template = ("{{ bos_token }}" if in_template else "") + "{{ messages[0].content }}"
    tokenizer = load_tokenizer(write("llama", add_bos_token=add_bos, chat_template=template))
    assert (await chat_prompt(serve, tokenizer)).count(1) == in_template
    assert (await chat_prompt(serve, tokenizer, add_special_tokens=True)).count(1) == (in_template or add_bos)


def test_eos_flag_is_obeyed_and_end_of_turn_ends_too(write: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(write(add_eos_token=True, eot_token_id=2))
    assert tokenizer.encode("h")[-1] == 1
    assert tokenizer.eos_token_ids == (1, 2)


@pytest.mark.parametrize(("kind", "ends"), [(CONTROL, (1, 2)), (NORMAL, (1,))])
def test_end_of_turn_that_no_key_names_is_known_by_its_text(
    write: Callable[..., Path], kind: int, ends: tuple[int, ...]
) -> None:
    tokens, kinds, _ = byte_level_vocab()
    tokens[2], kinds[2] = "<|im_end|>", kind
    assert load_tokenizer(write(tokens=tokens, token_type=kinds)).eos_token_ids == ends


def test_what_is_not_known_is_named(write: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'new-model'.*--tokenizer"):
        load_tokenizer(write(pre="new-model"))
    with pytest.raises(UnsupportedModelError, match=r"'rwkv'.*--tokenizer"):
        load_tokenizer(write("rwkv"))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("gpt2", {"tokens": None}, "no tokenizer"),
        ("gpt2", {"merges": None}, "merges"),
        ("gpt2", {"merges": ["h e", "x y"]}, "1 of its 2 merges"),
        ("gpt2", {"bos_token_id": 10**6}, "bos_token_id 1000000"),
        ("llama", {"scores": None}, "scores"),
        ("llama", {"scores": [0.5]}, "scores"),
    ],
)
def test_unsound_vocabularies_are_refused_by_file(
    write: Callable[..., Path], model: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{message}"):
        load_tokenizer(write(model, **changes))


def test_files_cut_anywhere_are_checkpoint_errors(write: Callable[..., Path]) -> None:
    data = write().read_bytes()
    generator = random.Random(0)
    for length in [0, 3, 4, 7, 20, len(data) - 1, *generator.sample(range(len(data)), 40)]:
        path = write().with_name("cut.gguf")
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load_tokenizer(path)


@pytest.mark.parametrize("at", [4, 16, 24], ids=["version", "number of pairs", "length of a key"])
def test_absurd_numbers_are_checkpoint_errors(write: Callable[..., Path], at: int) -> None:
    path = write()
    data = bytearray(path.read_bytes())
    data[at : at + 8] = struct.pack("<Q", 2**60)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load_tokenizer(path)


TEXTS = (
    "Hello, world! It's 'quoted' and we'll see.",
    "  leading, trailing  and   many    spaces \n\n\n\tindent\r\n",
    "def fold(sheet, times):\n    return [sheet] * 2 ** times  # 🇨🇭 👍🏽\n",
    "你好,世界。Привет, мир! Größe, naïve, ďábel, ﬁ, Ⅷ, ½",
    "<table><td>x</td></table> <|im_start|>user\nhi<|im_end|>",
    "a" * 50 + " " * 40 + "\t" * 33 + "\n" * 35 + "b",
)


@pytest.mark.real_model
def test_smollm2_gives_the_ids_of_transformers() -> None:
    from transformers import AutoTokenizer

    path = smollm2_gguf()
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (len(theirs), 1, (2,))
    for text in TEXTS:
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
        # Transformers does not know that this vocabulary cuts numbers into digits; see the next test.
        text = "".join(character for character in text if not character.isnumeric())
        assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.encode_chat(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.real_model
def test_smollm2_cuts_numbers_into_digits() -> None:
    tokenizer = load_tokenizer(smollm2_gguf())
    tokens = {tokenizer.token_text(i) for i in range(tokenizer.vocab_size)}
    assert not any(token.strip().isdecimal() and len(token) > 1 for token in tokens if token.isascii())
    assert [tokenizer.token_text(i) for i in tokenizer.encode("in 1984, 2x")] == [
        *("in", " ", "1", "9", "8", "4", ",", " ", "2", "x")
    ]


@pytest.fixture(scope="module")
def gemma() -> tuple[Tokenizer, Any]:
    """Ours, and the sentencepiece library with a model made of the same vocabulary."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pb: Any = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    path = gemma3_gguf()
    metadata = read_header(path).metadata
    model = pb.ModelProto()
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id, model.trainer_spec.pad_id = (
        3,
        2,
        1,
        0,
    )
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    for index, (token, score, kind) in enumerate(zip(*columns, strict=True)):
        piece = model.pieces.add()
        piece.piece = token.replace(" ", "▁") if kind == USER_DEFINED else token
        piece.score = score
        piece.type = UNKNOWN if index == 3 else int(kind)
    return load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


@pytest.mark.real_model
def test_gemma_gives_the_ids_of_sentencepiece(gemma: tuple[Tokenizer, Any]) -> None:
    ours, theirs = gemma
    for text in TEXTS:
        assert ours.encode(text) == [2, *theirs.encode(text)]
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.real_model
@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("abcde thing \n\t .,1")), max_size=40))
def test_gemma_gives_the_ids_of_sentencepiece_for_any_text(gemma: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = gemma
    text = text.replace("▁", "_").replace("\0", "")
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
