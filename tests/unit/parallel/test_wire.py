"""A step survives the way to another rank, whatever it holds."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from octavo.parallel.wire import decode_batch, decode_masks, encode_batch, encode_masks, is_masks
from octavo.plugin.step import Admit, Batch, BlockUpdate, Masks
from octavo.sampling.params import SamplingParams

PARAMS = SamplingParams(
    temperature=0.7,
    seed=-5,
    stop_token_ids=(3, 4),
    logit_bias={7: -1.5, 9: 100.0},
    allowed_token_ids=(1, 7, 9),
    bad_words_ids=((1, 2), (3,)),
    min_tokens=2,
    logprobs=3,
)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


FULL = Batch(
    step=12,
    rows=ints(4, 0, 2),
    starts=ints(9, 3, 0),
    counts=ints(1, 1, 5),
    samples=np.array([True, False, True]),
    admits=[
        Admit(row=2, token_ids=ints(5, 6, 7), num_prompt_tokens=3, params=PARAMS, seed=2**63 - 1, stop_ids=(2,)),
        Admit(row=1, token_ids=ints(), num_prompt_tokens=0, params=SamplingParams(), seed=-(2**63), lora=4),
    ],
    blocks=[BlockUpdate(rows=ints(2), indices=ints(0), blocks=ints(17))],
    released=[1, 3],
    drafts=np.array([[1, -1], [2, 3], [-1, -1]], np.int32),
    masked=True,
)


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype
        assert got.flags.writeable
        np.testing.assert_array_equal(got, want)
    elif is_dataclass(want):
        assert type(got) is type(want)
        for field in fields(want):
            assert_same(getattr(got, field.name), getattr(want, field.name))
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    else:
        assert type(got) is type(want)
        assert got == want


def test_every_field_arrives() -> None:
    for field in fields(Batch):
        assert getattr(FULL, field.name) is not None, f"{field.name} is not in the test's batch"
    assert_same(decode_batch(encode_batch(FULL)), FULL)


def test_a_plain_decode_step_arrives_and_is_small() -> None:
    n = 64
    rows = np.arange(n, dtype=np.int32)
    batch = Batch(step=3, rows=rows, starts=rows + 100, counts=np.ones(n, np.int32), samples=np.ones(n, np.bool_))
    message = encode_batch(batch)
    assert len(message) < 13 * n + 250
    assert_same(decode_batch(message), batch)


def test_numpy_scalars_arrive_as_numbers() -> None:
    batch = Batch(
        step=np.int64(3),  # type: ignore[arg-type]
        rows=ints(0),
        starts=ints(0),
        counts=ints(1),
        samples=np.array([True]),
        released=[np.int32(5)],  # type: ignore[list-item]
    )
    got = decode_batch(encode_batch(batch))
    assert (got.step, list(got.released)) == (3, [5])


def test_what_cannot_be_sent_is_named() -> None:
    batch = Batch(step=0, rows=ints(), starts=ints(), counts=ints(), samples=np.ones(0, np.bool_), released=[object()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="holds a object"):
        encode_batch(batch)


def test_masks_arrive_and_are_told_from_a_batch() -> None:
    masks = Masks(step=9, places=ints(0, 2), words=np.array([[-1, 5], [7, 1]], np.int32))
    assert is_masks(encode_masks(masks))
    assert not is_masks(encode_batch(FULL))
    assert_same(decode_masks(encode_masks(masks)), masks)
