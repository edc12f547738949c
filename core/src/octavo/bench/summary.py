"""Figures of a served load, under the names that vLLM's benchmark gives them.

ttft: sending a request to its first token. tpot: the rest of an answer's time over the rest of its tokens.
itl: between two events of a stream that bring tokens. e2el: sending a request to its last token. Milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.bench.sse_client import Answer
from octavo.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")
"""What one request can meet or miss."""
MAX_ERRORS = 5


def summarize(
    answers: Sequence[Answer], *, duration: float, percentiles: Sequence[float], goals: Mapping[str, float]
) -> dict[str, Any]:
    """All figures of one run. duration: seconds of the whole run. goals: metric -> most milliseconds, for goodput.

    Failed requests count as `failed` only; a metric without values is None.
    """
    good = [answer for answer in answers if not answer.error]
    num_input, num_output = (sum(getattr(a, name) for a in good) for name in ("num_prompt", "num_output"))
    per_answer = [latencies(answer) for answer in good]
    values: dict[str, list[float]] = {
        name: [value for one in per_answer if (value := one[name]) is not None] for name in GOALS
    }
    values["itl"] = [gap for answer in good for gap in (1e3 * np.diff(answer.arrivals)).tolist()]
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_concurrent_requests": most_at_once(answers),
    }
    if goals:
        met = sum(all((one[name] or 0.0) <= limit for name, limit in goals.items()) for one in per_answer)
        figures["request_goodput"] = met / duration
    for name in METRICS:
        figures |= spread(name, values[name], percentiles)
    errors = Counter(answer.error for answer in answers if answer.error)
    figures["errors"] = dict(errors.most_common(MAX_ERRORS))
    return figures


def latencies(answer: Answer) -> dict[str, float | None]:
    """The figures of one good answer in milliseconds. tpot is None for a single token."""
    ttft, e2el = 1e3 * (answer.arrivals[0] - answer.started), 1e3 * (answer.ended - answer.started)
    tpot = (e2el - ttft) / (answer.num_output - 1) if answer.num_output > 1 else None
    return {"ttft": ttft, "tpot": tpot, "e2el": e2el}


def spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean_X_ms, median_X_ms, std_X_ms and pN_X_ms."""
    keys = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    if not values:
        return {f"{key}_{name}_ms": None for key in keys}
    found = [np.mean(values), np.median(values), np.std(values), *np.percentile(values, percentiles)]
    return {f"{key}_{name}_ms": float(value) for key, value in zip(keys, found, strict=True)}


def most_at_once(answers: Sequence[Answer]) -> int:
    """Most requests that were open at one moment. One that ends as another starts is not open with it."""
    changes = sorted([(a.started, 1) for a in answers] + [(a.ended, -1) for a in answers])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def read_goals(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:200` -> {"ttft": 200.0}. Raises ConfigError."""
    goals = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in GOALS or not limit > 0:
            raise ConfigError(f"goodput is {text!r}, must look like ttft:200 (of {', '.join(GOALS)}; milliseconds)")
        goals[name] = limit
    return goals


def read_percentiles(text: str) -> tuple[float, ...]:
    """`50,99.9` -> (50.0, 99.9). Raises ConfigError."""
    try:
        percentiles = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        percentiles = ()
    if not percentiles or not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(f"metric_percentiles is {text!r}, must be numbers of 0 to 100 such as 50,99")
    return percentiles
