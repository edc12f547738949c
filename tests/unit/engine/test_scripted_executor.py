"""The scripted executor must notice a scheduler that breaks the KV contract: here the batches are made by hand."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from octavo.plugin.step import Admit, Batch, BlockUpdate, KVGroup
from octavo.sampling.params import SamplingParams
from octavo.testing.scripted import ScriptedExecutor


def ints(*numbers):
    return np.array(numbers, np.int32)


def admit(row, tokens, *, lora=0, prompt=None, **params):
    return Admit(
        row=row,
        token_ids=ints(*tokens),
        num_prompt_tokens=prompt or len(tokens),
        params=SamplingParams(**params),
        seed=0,
        lora=lora,
    )


def table(*entries):
    """Entries (row, index, block)."""
    rows, indices, blocks = zip(*entries, strict=True)
    return (BlockUpdate(rows=ints(*rows), indices=ints(*indices), blocks=ints(*blocks)),)


class Steps:
    """Numbers batches and sends them."""

    def __init__(self, script=(10, 11, 12), **options):
        options.setdefault("kv_groups", (KVGroup(block_size=4, num_blocks=8),))
        self.executor = ScriptedExecutor(script, **options)
        self._number = count(1)

    def __call__(self, *entries, samples=None, **parts):
        """Entries (row, start, count)."""
        rows, starts, counts = zip(*entries, strict=True)
        flags = np.ones(len(rows), np.bool_) if samples is None else np.array(samples)
        batch = Batch(
            step=next(self._number),
            rows=ints(*rows),
            starts=ints(*starts),
            counts=ints(*counts),
            samples=flags,
            **parts,
        )
        self.executor.launch(batch)
        return self.executor.collect()


def test_script_is_followed_and_ends_in_eos():
    step = Steps(eos=9)
    result = step((0, 0, 2), admits=[admit(0, [1, 2])], blocks=table((0, 0, 3), (0, 1, 4)))
    assert result.tokens.tolist() == [[10]]
    assert [step((0, 2 + i, 1)).tokens.tolist() for i in range(4)] == [[[11]], [[12]], [[9]], [[9]]]


def test_several_tokens_a_step_are_padded():
    step = Steps(width=lambda number, row: row + 1)
    result = step(
        (0, 0, 1),
        (1, 0, 1),
        admits=[admit(0, [1]), admit(1, [1])],
        blocks=table((0, 0, 1), (1, 0, 2)),
    )
    assert result.tokens.tolist() == [[10, -1], [10, 11]]
    assert result.counts.tolist() == [1, 2]


def test_unfinished_prompt_gives_no_token():
    step = Steps()
    result = step((0, 0, 2), samples=[False], admits=[admit(0, [1, 2, 3])], blocks=table((0, 0, 1)))
    assert (len(result.rows), result.tokens.shape) == (0, (0, 1))


def test_position_without_a_block_is_noticed():
    with pytest.raises(AssertionError, match="row 0 has no block for position 4"):
        Steps()((0, 0, 5), admits=[admit(0, [1, 2, 3, 4, 5])], blocks=table((0, 0, 1)))


def test_skipped_position_is_noticed():
    with pytest.raises(AssertionError, match="row 0 reads wrong memory at position 0"):
        Steps()((0, 1, 2), admits=[admit(0, [1, 2, 3])], blocks=table((0, 0, 1)))


def test_unknown_token_is_noticed():
    with pytest.raises(AssertionError, match="tokens that nobody knows yet"):
        Steps()((0, 0, 4), admits=[admit(0, [1, 2, 3])], blocks=table((0, 0, 1)))


def test_two_rows_writing_one_block_are_noticed():
    with pytest.raises(AssertionError, match="rows 0 and 1 write block 1 in one step"):
        Steps()((0, 0, 1), (1, 0, 1), admits=[admit(0, [1]), admit(1, [2])], blocks=table((0, 0, 1), (1, 0, 1)))


def test_block_taken_from_a_row_that_needs_it_is_noticed():
    step = Steps()
    step((0, 0, 1), admits=[admit(0, [1])], blocks=table((0, 0, 1)))
    with pytest.raises(AssertionError, match="row 1 overwrites block 1, which row 0 needs"):
        step((1, 0, 1), admits=[admit(1, [2])], blocks=table((1, 0, 1)))


def test_block_of_a_released_row_may_be_taken():
    step = Steps()
    step((0, 0, 1), admits=[admit(0, [1])], blocks=table((0, 0, 1)))
    result = step((0, 0, 1), admits=[admit(0, [2])], blocks=table((0, 0, 1)), released=[0])
    assert result.tokens.tolist() == [[10]]


def test_block_behind_a_window_may_be_taken_but_not_one_inside():
    for position, allowed in ((5, True), (4, False)):
        step = Steps(kv_groups=(KVGroup(block_size=2, num_blocks=8, window=3),))
        entries = [(0, i, i + 1) for i in range(4)]
        step((0, 0, position), admits=[admit(0, range(1, 8))], blocks=table(*entries), samples=[False])
        if allowed:
            step((1, 0, 1), admits=[admit(1, [2])], blocks=table((1, 0, 1)))
            continue
        with pytest.raises(AssertionError, match="overwrites block 2"):
            step((1, 0, 1), admits=[admit(1, [2])], blocks=table((1, 0, 2)))


def test_prefix_of_other_tokens_or_another_adapter_is_noticed():
    for tokens, lora, same in (([1, 2, 3, 4], 0, True), ([9, 2, 3, 4], 0, False), ([1, 2, 3, 4], 1, False)):
        step = Steps()
        step((0, 0, 4), admits=[admit(0, [1, 2, 3, 4])], blocks=table((0, 0, 1)))
        share = {"admits": [admit(1, [*tokens, 5], lora=lora)], "blocks": table((1, 0, 1), (1, 1, 2))}
        if same:
            step((1, 4, 1), **share)
            continue
        with pytest.raises(AssertionError, match="row 1 reads wrong memory"):
            step((1, 4, 1), **share)


def test_preempted_row_must_come_back_with_its_tokens():
    step = Steps()
    step((0, 0, 2), admits=[admit(0, [1, 10], prompt=1)], blocks=table((0, 0, 1)))
    with pytest.raises(AssertionError, match="wrong token at 1"):
        step((1, 0, 2), admits=[admit(1, [1, 99], prompt=1)], blocks=table((1, 0, 2)))


def test_row_in_use_may_not_be_admitted_again():
    step = Steps()
    step((0, 0, 1), admits=[admit(0, [1])], blocks=table((0, 0, 1)))
    with pytest.raises(AssertionError, match="row 0 is admitted twice"):
        step((0, 0, 1), admits=[admit(0, [1])])


def test_logprobs_are_finite_and_name_the_tokens():
    step = Steps()
    result = step((0, 0, 3), admits=[admit(0, [1, 2, 3], logprobs=2, prompt_logprobs=0)], blocks=table((0, 0, 1)))
    (answer,), (prompt,) = result.logprobs, result.prompt_logprobs
    assert (answer.start, answer.ids.tolist()) == (3, [[10, 10, 11]])
    assert (prompt.start, prompt.ids.tolist()) == (1, [[2], [3]])
    assert np.isfinite(answer.values).all()
    assert (np.diff(answer.values[0, 1:]) < 0).all()


def test_failures_are_as_ordered():
    step = Steps(fail_at_step=2, fail_rows={1: [0]})
    result = step((0, 0, 1), admits=[admit(0, [1])], blocks=table((0, 0, 1)))
    assert list(result.errors) == [0]
    with pytest.raises(RuntimeError, match="scripted failure of step 2"):
        step((0, 1, 1))
    assert step((0, 2, 1)).step == 3
