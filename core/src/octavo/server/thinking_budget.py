"""A limit on reasoning, in the marks that the served model writes around it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from octavo.engine.door import THINKING
from octavo.sampling.params import SamplingParams
from octavo.server.parsers.registry import Format


def in_marks_of(
    format: Format, params: SamplingParams, *, in_reasoning: bool, encode: Callable[[str], list[int]]
) -> SamplingParams:
    """The parameters with `thinking_token_budget` as the argument of its logits processor.

    in_reasoning: the answer begins inside of reasoning, whatever the prompt's text shows of that. encode: a mark's
    token ids. A model whose format has no end of reasoning keeps the parameter, for which the door knows usual marks.
    """
    budget, ends = params.thinking_token_budget, format.reasoning_end
    if budget is None or format.reasoning is None or not ends:
        return params
    marks = format.reasoning.start
    start = [] if in_reasoning or not marks else encode(marks[0])
    argument = {"budget": budget, "start": start, "end": encode(ends[0])}
    return msgspec.structs.replace(
        params, thinking_token_budget=None, extra_args={**(params.extra_args or {}), THINKING: argument}
    )
