"""Seeded work: frozen id by id, and clear about what does not fit together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from octavo.bench.workload import Source, Work, make_work
from octavo.errors import ConfigError
from octavo.testing.tiny import make_tokenizer
from octavo.tokenizer import Tokenizer, load_tokenizer

SKEWED = "741c05e0510375ad171cb1d4b00a19c313918c9f85abc7f2026158289b9df17c"
FIXED = "48c22a294a9887235e7a5e58a4de6fdcec328f79335ef111f1dde0282b7f7731"
"""Of the definitions that other engines were measured with: a change here makes all kept figures worthless."""


def checksum(work: list[Work]) -> str:
    text = json.dumps([[w.prompt, w.num_output] for w in work], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def conversation(question: str, answer: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_skewed_work_is_the_frozen_one_id_by_id() -> None:
    work = make_work("skewed", num_prompts=1000)
    assert (sum(len(w.prompt) for w in work), sum(w.num_output for w in work)) == (288_512, 176_081)
    assert checksum(work) == SKEWED


def test_fixed_work_is_the_frozen_one_id_by_id() -> None:
    assert checksum(make_work("random", num_prompts=4, input_len=128, output_len=64, seed=1)) == FIXED


def test_seed_decides_and_fewer_prompts_are_a_beginning_of_more() -> None:
    few, many = (make_work("skewed", num_prompts=n, seed=3) for n in (2, 5))
    assert many[:2] == few
    assert make_work("skewed", num_prompts=2, seed=4) != few


def test_ids_stay_inside_a_small_vocabulary() -> None:
    work = make_work("random", num_prompts=8, input_len=50, output_len=1, vocab_size=40)
    assert {token for w in work for token in w.prompt} == set(range(10, 40))
    with pytest.raises(ConfigError, match="vocab_size is 10"):
        make_work("random", num_prompts=1, vocab_size=10)


def test_mix_keeps_its_bounds() -> None:
    work = Source(7).mix(32)
    assert all(32 <= len(w.prompt) <= 512 and 32 <= w.num_output <= 256 for w in work)


def test_sharegpt_takes_first_questions_of_usable_length(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = [conversation(f"question number {i}", f"the answer is {i}") for i in range(6)]
    data += [conversation("x", "y"), conversation("long " * 2000, "answer text"), {"conversations": []}]
    path = write(tmp_path / "chats.json", data)
    work = make_work("sharegpt", num_prompts=6, path=path, tokenizer=tokenizer)
    assert {w.text for w in work} == {f"question number {i}" for i in range(6)}
    for w in work:
        assert w.text is not None
        assert w.prompt == tokenizer.encode(w.text)
        assert w.num_output == len(tokenizer.encode(f"the answer is {w.text[-1]}"))
    assert [w.text for w in work] != [f"question number {i}" for i in range(6)], "the order is drawn"
    again = make_work("sharegpt", num_prompts=6, path=path, tokenizer=tokenizer, output_len=9)
    assert {w.num_output for w in again} == {9}
    with pytest.raises(ConfigError, match="holds 6 conversations of usable length"):
        make_work("sharegpt", num_prompts=7, path=path, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"conversations": []}, "must hold a JSON list"),
        ([{"turns": []}], "entry 0 of .* has no list 'conversations'"),
        ([conversation("a", "b"), {"conversations": [{"text": "q"}, {"text": "a"}]}], "a turn of entry 1"),
    ],
)
def test_other_files_are_refused_by_entry(tmp_path: Path, tokenizer: Tokenizer, data: object, complaint: str) -> None:
    path = write(tmp_path / "chats.json", data)
    with pytest.raises(ConfigError, match=complaint):
        make_work("sharegpt", num_prompts=1, path=path, tokenizer=tokenizer)


def test_file_that_is_no_json_or_absent_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "chats.json"
    with pytest.raises(ConfigError, match=r"chats\.json cannot be read"):
        make_work("sharegpt", num_prompts=1, path=path, tokenizer=tokenizer)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"chats\.json cannot be read"):
        make_work("sharegpt", num_prompts=1, path=path, tokenizer=tokenizer)


def test_settings_that_a_dataset_ignores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="input_len has no meaning for skewed"):
        make_work("skewed", num_prompts=1, input_len=5)
    with pytest.raises(ConfigError, match="output_len has no meaning for skewed"):
        make_work("skewed", num_prompts=1, output_len=5)
    with pytest.raises(ConfigError, match="dataset_path is read for --dataset-name sharegpt, not for random"):
        make_work("random", num_prompts=1, path=tmp_path)
    with pytest.raises(ConfigError, match="sharegpt needs dataset_path"):
        make_work("sharegpt", num_prompts=1)
    with pytest.raises(ConfigError, match="dataset_name is 'other'"):
        make_work("other", num_prompts=1)
    with pytest.raises(ConfigError, match="sharegpt needs a tokenizer"):
        make_work("sharegpt", num_prompts=1, path=tmp_path)
