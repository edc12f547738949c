"""A tokenizer, model facts and hand-made deltas for tests of the API side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from octavo.engine.info import ModelInfo
from octavo.engine.messages import Deltas, Finish, LogprobBlock
from octavo.testing.tiny import make_tokenizer
from octavo.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE of 384 tokens without BOS; `<|im_end|>` (2) is EOS."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same with a BOS (0) before every text."""
    folder = tmp_path_factory.mktemp("bos_tokenizer")
    make_tokenizer(folder, bos=True)
    return load_tokenizer(folder)


@pytest.fixture
def info() -> ModelInfo:
    return ModelInfo(
        model="tiny",
        served_names=("tiny",),
        max_model_len=64,
        vocab_size=384,
        eos_token_ids=(2,),
        platform="refdev",
        dtype="float32",
        num_kv_blocks=100,
        max_num_seqs=4,
    )


@pytest.fixture
def deltas() -> Callable[..., Deltas]:
    """deltas((handle, tokens), (handle, tokens, finish), ..., cached=..., logprobs=..., failures=...)"""

    def make(*rows: tuple[Any, ...], cached: int = 0, **fields: Any) -> Deltas:
        full = [(*row, Finish.RUNNING)[:3] for row in rows]
        return Deltas(
            step=1,
            handles=np.array([row[0] for row in full], "<i8").tobytes(),
            counts=np.array([len(row[1]) for row in full], "<i4").tobytes(),
            finish=np.array([row[2] for row in full], np.int8).tobytes(),
            cached=np.full(len(full), cached, "<i4").tobytes(),
            tokens=np.array([token for row in full for token in row[1]], "<i4").tobytes(),
            **fields,
        )

    return make


@pytest.fixture
def logprob_block() -> Callable[..., LogprobBlock]:
    """logprob_block(handle, [[actual, top...], ...], values, ranks, prompt=False, start=0)"""

    def make(
        handle: int,
        ids: Sequence[Sequence[int]],
        values: Sequence[Sequence[float]],
        ranks: Sequence[int],
        *,
        prompt: bool = False,
        start: int = 0,
    ) -> LogprobBlock:
        return LogprobBlock(
            handle=handle,
            prompt=prompt,
            start=start,
            width=len(ids[0]),
            ids=np.array(ids, "<i4").tobytes(),
            values=np.array(values, "<f4").tobytes(),
            ranks=np.array(ranks, "<i4").tobytes(),
        )

    return make
