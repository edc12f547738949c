"""The examples as they stood for older plugin APIs still load, bind and serve, whatever became of them since."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed_examples import install, modules_of

from octavo import LLM, SamplingParams
from octavo.testing.tiny import make_model

FROZEN = Path(__file__).parent / "plugin_api_1_0"
NAMES = ("acme", "acme-full", "kernel-pack", "extension")
PROMPTS = [[17, 40, 3], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_kv_blocks": 16, "skip_tokenizer_init": True}

DIGEST = "ceb1f9fb580e51ca"
"""Of all frozen files. It never changes for an API that has been published."""


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The frozen examples on the import path; gone again behind the last test."""
    folder = tmp_path_factory.mktemp("frozen")
    for name in NAMES:
        install(FROZEN / name, folder)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("ACME_DEVICE", os.devnull)
        patch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
        yield folder
    ours = set.union(*(modules_of(FROZEN / name) for name in NAMES))
    for module in set(sys.modules) - before:
        if module.partition(".")[0] in ours:
            del sys.modules[module]


def served(folder: Path, platform: str, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), platform=platform, **SETTINGS | settings) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_frozen_files_are_as_they_were() -> None:
    digest = hashlib.sha256()
    for path in sorted(path for name in NAMES for path in (FROZEN / name).rglob("*")):
        if path.is_file() and path.suffix in (".py", ".toml", ".c"):
            digest.update(str(path.relative_to(FROZEN)).encode() + path.read_bytes())
    assert digest.hexdigest()[:16] == DIGEST, "a frozen plugin was edited: put it back, and change core instead"


@pytest.mark.parametrize("platform", ["acme", "acme_full"])
def test_old_platforms_serve_the_tokens_of_todays(tmp_path: Path, platform: str) -> None:
    folder = make_model(tmp_path, "llama", seed=1, tokenizer=False)
    assert served(folder, platform, require_native=("attention",)) == served(folder, "refdev")


def test_an_old_kernel_pack_serves_a_platform_of_today(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", seed=2, tokenizer=False)
    assert served(folder, "cpu", attention_backend="sdpa") == served(folder, "refdev")


def test_an_old_extension_brings_its_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "seed_oss", seed=3, tokenizer=False)
    assert served(folder, "acme_full") == served(folder, "refdev")
