"""Whole steps on tapes: the tokens of a replayed engine are those of one that calls every layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.testing.tiny import make_model
from octavo_cpu import native
from octavo_cpu.tape import Recorded, Tape, TapeRunner

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")

PROMPTS = [[3, 4, 5], [9, 8, 7, 6], list(range(3, 60)), [11] * 17]
TEMPERATURES, LENGTHS = (0.0, 1.0, 0.0, 0.7), (40, 30, 20, 12)
SETTINGS = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_blocks": 64, "skip_tokenizer_init": True}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """What is recorded meanwhile."""
    found: list[Recorded] = []
    record = TapeRunner._record

    def noted(self: TapeRunner, handle: Recorded) -> object:
        outputs = record(self, handle)
        found.append(handle)
        return outputs

    monkeypatch.setattr(TapeRunner, "_record", noted)
    return found


def tokens_of(model: str, dtype: str, *, eager: bool, **more: int) -> list[list[int]]:
    """Two rounds of answers that end one after the other, so that batches of every size are replayed."""
    params = [
        SamplingParams(temperature=t, max_tokens=n, ignore_eos=True, detokenize=False, seed=5)
        for t, n in zip(TEMPERATURES, LENGTHS, strict=True)
    ]
    with LLM(model, platform="cpu", dtype=dtype, enforce_eager=eager, **SETTINGS, **more) as llm:
        rounds = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
    return [list(output.outputs[0].token_ids) for outputs in rounds for output in outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "granite", "olmo2"])
def test_replayed_steps_give_the_tokens_of_eager_ones(
    tmp_path: Path, model_type: str, dtype: str, recorded: list[Recorded]
) -> None:
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    eager = tokens_of(model, dtype, eager=True)
    assert not recorded
    assert tokens_of(model, dtype, eager=False) == eager
    assert {handle.key.num_seqs for handle in recorded} >= {1, 2, 3, 4}
    assert not [handle.computed for handle in recorded if handle.computed]


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "qwen2", "smollm3", "gemma2"])
def test_decode_steps_of_a_model_are_recorded_whole(tmp_path: Path, model_type: str, recorded: list[Recorded]) -> None:
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    with LLM(model, platform="cpu", **SETTINGS) as llm:
        llm.generate([[3, 4, 5]], params, use_tqdm=False)
    assert recorded
    assert not [handle.computed for handle in recorded if handle.computed]


@pytest.mark.parametrize("model_type", ["llama", "granite"])
def test_ranks_decode_on_tapes_and_give_the_tokens_of_eager_ones(
    tmp_path: Path, model_type: str, recorded: list[Recorded]
) -> None:
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    eager = tokens_of(model, "float32", eager=True, tensor_parallel_size=2)
    assert not recorded
    assert tokens_of(model, "float32", eager=False, tensor_parallel_size=2) == eager
    assert {handle.key.num_seqs for handle in recorded} >= {1, 2, 3, 4}
    assert not [handle.computed for handle in recorded if handle.computed]


def test_a_tape_that_was_cut_short_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above means something: a tape that lacks a call gives other tokens."""
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    eager = tokens_of(model, "float32", eager=True)
    counts = [0]
    whole = Tape.append

    def lossy(self: Tape, function: int, args: bytes) -> None:
        counts[0] += 1
        if counts[0] % 10:
            whole(self, function, args)

    monkeypatch.setattr(Tape, "append", lossy)
    assert tokens_of(model, "float32", eager=False) != eager
