"""Drafters that know the answers: what an engine said without drafts is what they guess when it is asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM
from octavo.extensions import Extensions, load_extensions
from octavo.outputs import RequestOutput
from octavo.plugin import Drafter, DrafterSpec, DraftInput
from octavo.speculate import drafting
from octavo.testing.tiny import make_model

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 80,
    "skip_tokenizer_init": True,
}


@dataclass
class Told:
    """texts: whole ones, prompt and answer. right: of ten drafts, how many it says as they are."""

    texts: list[list[int]] = field(default_factory=list)
    right: int = 10


class Teller:
    """Implements `octavo.plugin.Drafter`: continues the text that it was told and that begins as a sequence does."""

    told = Told()

    def __init__(self, spec: DrafterSpec) -> None:
        self.num = 0

    def propose(self, batch: DraftInput) -> Any:
        drafts = np.full((len(batch.tokens), int(batch.most.max())), -1, np.int32)
        for row, tokens, most in zip(drafts, batch.tokens, batch.most.tolist(), strict=True):
            known = tokens.tolist()
            text = next((t for t in self.told.texts if t[: len(known)] == known), known)
            for i, token in enumerate(text[len(known) : len(known) + most]):
                self.num += 7
                row[i] = token if self.num % 10 < self.told.right else (token + 1) % 100
        return drafts


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """What the drafter "teller" knows; it is installed as long as the test runs."""

    def with_teller(*arguments: Any) -> Extensions:
        registry = load_extensions(*arguments)
        registry.drafter("teller", "tests:Teller")
        return registry

    resolve = drafting.resolve

    def resolve_teller(target: str) -> type[Drafter]:
        return Teller if target == "tests:Teller" else resolve(target)

    monkeypatch.setattr("octavo.launch.load_extensions", with_teller)
    monkeypatch.setattr(drafting, "resolve", resolve_teller)
    monkeypatch.setattr(Teller, "told", Told())
    return Teller.told


@pytest.fixture(autouse=True)
def platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev,cpu=octavo_cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model of a type, made once."""
    made: dict[str, Path] = {}

    def folder(name: str = "llama") -> Path:
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp(name) / "model", name, seed=4, tokenizer=False)
        return made[name]

    return folder


def texts_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [[*(o.prompt_token_ids or ()), *answer.token_ids] for o in outputs for answer in o.outputs]


def seen(outputs: Sequence[RequestOutput]) -> list[Any]:
    """What must not depend on speculation."""
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, ranks(answer.logprobs))
        for output in outputs
        for answer in output.outputs
    ]


def ranks(logprobs: Any) -> Any:
    """Values are those of another step's shape, so that they may differ in their last digits."""
    return logprobs and [
        [(token, entry.rank, round(entry.logprob, 2)) for token, entry in entries.items()] for entries in logprobs
    ]


@pytest.fixture
def both(told: Told, folders: Callable[..., Path]) -> Callable[..., tuple[Any, Any]]:
    """Serve without and with speculation; the answers must be equal. Returns the statistics of both."""

    def serve(
        prompts: list[Any], params: Any, *, right: int = 10, model: str = "llama", drafts: int = 4, **settings: Any
    ) -> tuple[Any, Any]:
        folder = folders(model)
        whole = SETTINGS | {"platform": "cpu"} | settings
        with LLM(str(folder), **whole) as llm:
            plain = llm.generate(prompts, params, use_tqdm=False)
            before = llm.stats
        told.texts, told.right = texts_of(plain), right
        speculative = {"method": "teller", "num_speculative_tokens": drafts}
        with LLM(str(folder), **whole | {"speculative_config": speculative}) as llm:
            drafted = llm.generate(prompts, params, use_tqdm=False)
            after = llm.stats
            assert (after.running, after.kv_usage) == (0, 0.0)
        assert seen(drafted) == seen(plain)
        return before, after

    return serve


@pytest.fixture
def answers_of(folders: Callable[..., Path]) -> Callable[..., list[list[int]]]:
    """What the tiny llama says without drafts."""

    def say(prompts: list[Any], params: Any) -> list[list[int]]:
        with LLM(str(folders()), platform="cpu", **SETTINGS) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    return say
