"""Scores of prompt tokens: every one but the first, once, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops.sampling import topk_logprobs
from octavo.plugin.step import Admit, Batch
from octavo.runner import scoring
from octavo.runner.scoring import PromptScorer
from octavo.sampling.params import SamplingParams

VOCAB = 17
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Head:
    """A model whose hidden states are its logits."""

    vocab_size = VOCAB

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize("chunks", [[8], [3, 5], [1, 1, 6], [7, 1]])
@pytest.mark.parametrize("piece", [1, 2, 128])
def test_all_prompt_tokens_but_the_first_are_scored_once(
    chunks: list[int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SLICE", piece)
    table = torch.zeros((2, 20), dtype=torch.int32)
    table[1, : len(PROMPT)] = torch.tensor(PROMPT)
    scorer = PromptScorer(Head(), topk_logprobs, table)
    params = SamplingParams(prompt_logprobs=2)
    scorer.admit(Admit(row=1, token_ids=np.array(PROMPT, np.int32), num_prompt_tokens=8, params=params, seed=0))
    hidden = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = hidden.log_softmax(-1)
    found: dict[int, tuple[int, float]] = {}
    start = 0
    for count in [*chunks, 1]:  # the last step is a decode, which scores nothing
        batch = Batch(
            step=start,
            rows=np.array([1], np.int32),
            starts=np.array([start], np.int32),
            counts=np.array([count], np.int32),
            samples=np.array([True]),
        )
        for row, first, ids, values, _ in scorer.score(batch, hidden[start : start + count]):
            assert row == 1
            assert ids.shape[1] == 3
            for place, (token, value) in enumerate(zip(ids[:, 0].tolist(), values[:, 0].tolist(), strict=True)):
                assert first + place not in found
                found[first + place] = (token, value)
        start += count
    assert sorted(found) == list(range(1, len(PROMPT)))
    for position, (token, value) in found.items():
        assert token == PROMPT[position]
        assert value == pytest.approx(float(expected[position - 1, token]), abs=1e-5)


def test_memory_for_a_long_prompt_is_that_of_a_slice() -> None:
    num_tokens, vocab = 4096, 32_000
    head = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0))
    most = 0

    class Wide:
        vocab_size = vocab

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            nonlocal most
            logits = hidden @ head
            most = max(most, logits.numel())
            return logits

    def scored(chunks: list[int]) -> list[torch.Tensor]:
        scorer = PromptScorer(Wide(), topk_logprobs, prompt[None])
        params = SamplingParams(prompt_logprobs=1)
        known = prompt.numpy()
        scorer.admit(Admit(row=0, token_ids=known, num_prompt_tokens=num_tokens, params=params, seed=0))
        found, start = [], 0
        for count in chunks:
            row, first = np.array([0], np.int32), np.array([start], np.int32)
            batch = Batch(
                step=start, rows=row, starts=first, counts=np.array([count], np.int32), samples=np.array([False])
            )
            found += scorer.score(batch, hidden[start : start + count])
            start += count
        return [torch.cat([piece[part] for piece in found]) for part in (2, 3, 4)]

    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(vocab, (num_tokens,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(num_tokens, 8, generator=generator)
    whole = scored([num_tokens])
    assert most <= scoring.SLICE * vocab
    assert [len(part) for part in whole] == [num_tokens - 1] * 3
    assert sum(part.numel() for part in whole) <= 5 * num_tokens
    for one, other in zip(whole, scored([700] * 5 + [596]), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=1e-4)


def test_scores_are_logits_where_asked_for() -> None:
    table = torch.tensor([PROMPT], dtype=torch.int32)
    hidden = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0))
    batch = Batch(
        step=0,
        rows=np.array([0], np.int32),
        starts=np.array([0], np.int32),
        counts=np.array([8], np.int32),
        samples=np.array([False]),
    )
    for mode in ("raw_logits", "processed_logits"):
        scorer = PromptScorer(Head(), topk_logprobs, table)
        params = SamplingParams(prompt_logprobs=2, logprobs_mode=mode)
        scorer.admit(Admit(row=0, token_ids=np.array(PROMPT, np.int32), num_prompt_tokens=8, params=params, seed=0))
        ((_, _, ids, values, _),) = scorer.score(batch, hidden)
        assert torch.equal(values, hidden[:7].gather(1, ids))
