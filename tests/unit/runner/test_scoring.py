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
