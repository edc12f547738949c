"""Padded shapes of steps."""

from __future__ import annotations

import pytest

from octavo.plugin import BatchKey, BatchLimits, BucketSpec, PlatformCaps, ScheduleLimits
from octavo.runner.buckets import Shapes

LIMITS = BatchLimits(max_num_tokens=100, max_num_seqs=10, max_model_len=512)
BUCKETS = BucketSpec(num_tokens=(8, 64, 128), num_seqs=(4, 16), max_context=(128, 512))


def test_dynamic_platform_gets_the_exact_shape() -> None:
    shapes = Shapes.of(PlatformCaps(), LIMITS, ())
    assert shapes.choose(37, 5, 200, 9) == (BatchKey(num_tokens=37, num_seqs=5), False)


def test_multiples_pad_tokens_and_sequences() -> None:
    caps = PlatformCaps(schedule=ScheduleLimits(token_multiple=8, seq_multiple=4))
    shapes = Shapes.of(caps, LIMITS, ())
    assert shapes.choose(37, 5, 200, 9) == (BatchKey(num_tokens=40, num_seqs=8), False)
    assert (shapes.max_tokens, shapes.max_seqs) == (104, 12)


@pytest.mark.parametrize(
    ("asked", "given"), [((1, 1, 1), (8, 4, 128)), ((9, 4, 129), (64, 4, 512)), ((64, 5, 128), (64, 16, 128))]
)
def test_static_platform_gets_the_least_bucket_that_holds_the_step(asked: tuple, given: tuple) -> None:
    shapes = Shapes.of(PlatformCaps(shapes="bucketed", buckets=BUCKETS), LIMITS, ())
    key = BatchKey(num_tokens=given[0], num_seqs=given[1], max_context=given[2])
    assert shapes.choose(*asked, 1) == (key, False)


def test_step_larger_than_every_bucket_is_an_error() -> None:
    shapes = Shapes.of(PlatformCaps(shapes="bucketed", buckets=BUCKETS), LIMITS, ())
    with pytest.raises(ValueError, match="largest bucket 128"):
        shapes.choose(129, 1, 1, 129)


def test_recorded_shape_is_preferred_and_the_rest_runs_eagerly() -> None:
    recorded = [BatchKey(num_tokens=8, num_seqs=8), BatchKey(num_tokens=2, num_seqs=2)]
    shapes = Shapes.of(PlatformCaps(), LIMITS, recorded)
    assert shapes.choose(1, 1, 500, 1) == (recorded[1], True)
    assert shapes.choose(3, 3, 500, 1) == (recorded[0], True)
    assert shapes.choose(9, 1, 500, 9) == (BatchKey(num_tokens=9, num_seqs=1), False)


def test_step_with_a_prompt_never_takes_a_shape_recorded_for_decodes() -> None:
    recorded = [BatchKey(num_tokens=8, num_seqs=8, max_q_len=1), BatchKey(num_tokens=64, num_seqs=8)]
    shapes = Shapes.of(PlatformCaps(), LIMITS, recorded)
    assert shapes.choose(6, 2, 100, 5) == (recorded[1], True)
    assert shapes.choose(6, 6, 100, 1) == (recorded[0], True)


def test_decodes_and_few_tokens_are_recorded_at_start_the_largest_first() -> None:
    decodes = [BatchKey(num_tokens=n, num_seqs=n, max_q_len=1) for n in (1, 8, 600)]
    mixed = [BatchKey(num_tokens=n, num_seqs=8) for n in (16, 512, 513, 2048)]
    shapes = Shapes.of(PlatformCaps(graph="capture"), LIMITS, [*decodes, *mixed])
    assert [key.num_tokens for key in shapes.at_start] == [600, 512, 16, 8, 1]
    assert shapes.largest == [mixed[-1], decodes[-1]]
    ahead = Shapes.of(PlatformCaps(graph="aot"), LIMITS, [*decodes, *mixed])
    assert [key.num_tokens for key in ahead.at_start] == [2048, 600, 513, 512, 16, 8, 1]
    assert Shapes.of(PlatformCaps(), LIMITS, ()).largest == []
