"""A limit on reasoning: after so many tokens of it, the mark that ends it is forced. A logits processor.

prompt ... <think> a b c d e </think> answer
                   |-budget-|^ forced, token by token
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.plugin.step import Admit

NEG_INF = float("-inf")


class ThinkingTokenBudget:
    """Implements `octavo.plugin.LogitsProcessor`; argument {"budget": n, "start": ids, "end": ids}.

    start, end: token ids of the marks around reasoning. Reasoning is on behind the last start mark that no end mark
    follows, in the prompt or in the answer; with no `start` ids, from the first token of the answer. Tokens of a prompt
    do not count.
    """

    def __init__(self, value: Any, admit: Admit) -> None:
        self.budget: int = value["budget"]
        self.start: tuple[int, ...] = tuple(value.get("start", ()))
        self.end: tuple[int, ...] = tuple(value["end"])
        self.num_prompt_tokens = admit.num_prompt_tokens

    @classmethod
    def check(cls, value: Any, vocab_size: int) -> None:
        if not isinstance(value, dict) or not {"budget", "end"} <= set(value) <= {"budget", "start", "end"}:
            raise ValueError('must be an object with "budget", "end" and perhaps "start"')
        budget = value["budget"]
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise ValueError(f"budget must be an integer of at least 0, not {budget!r}")
        for name in ("start", "end"):
            ids = value.get(name, ())
            if not isinstance(ids, list | tuple) or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
                raise ValueError(f"{name} must be a list of token ids of the vocabulary")
        if not value["end"]:
            raise ValueError("end must not be empty")

    @classmethod
    def apply(
        cls, processors: Sequence[ThinkingTokenBudget], logits: Tensor, tokens: Tensor, lengths: Sequence[int]
    ) -> None:
        for row, (processor, length) in enumerate(zip(processors, lengths, strict=True)):
            if length - processor.num_prompt_tokens >= processor.budget:
                processor._force(logits[row], tokens[row, :length])

    def _force(self, logits: Tensor, known: Tensor) -> None:
        """Allow only the next token of the end mark, if reasoning is on and spent. All on the device: no waiting."""
        length = len(known)
        if self.start:
            began, ended = self._last(known, self.start), self._last(known, self.end)
            thinking = (began > 0) & (ended < began)
        else:
            began = known.new_tensor(self.num_prompt_tokens)
            thinking = self._last(known[self.num_prompt_tokens :], self.end) == 0
        spent = length - began.clamp_min(self.num_prompt_tokens) >= self.budget
        # How much of the end mark stands there already: the longest beginning of it that is the text's end.
        progress = known.new_tensor(0)
        for size in range(1, min(len(self.end), length + 1)):
            mark = known.new_tensor(self.end[:size])
            progress = torch.where((known[length - size :] == mark).all(), size, progress)
        token = known.new_tensor(self.end)[progress.long()]
        only = torch.full_like(logits, NEG_INF).index_fill_(0, token.long()[None], 0.0)
        logits.copy_(torch.where(thinking & spent, only, logits))

    @staticmethod
    def _last(known: Tensor, mark: Sequence[int]) -> Tensor:
        """How many tokens there are up to the end of the mark's last occurrence; 0 if there is none."""
        size = len(mark)
        if len(known) < size:
            return known.new_tensor(0)
        found = (known.unfold(0, size, 1) == known.new_tensor(mark)).all(dim=-1)
        ends = torch.arange(size, len(known) + 1, device=known.device, dtype=known.dtype)
        return torch.where(found, ends, 0).max()
