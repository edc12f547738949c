"""The page docs/sampling.md: every sampling parameter, from the Structs that check them."""

from __future__ import annotations

import inspect
import re

import msgspec

from octavo.beam_search import BeamSearchParams
from octavo.sampling.params import RANGES, SamplingParams
from octavo.sampling.repetition import RepetitionDetectionParams

MODES = """\
`--logprobs-mode` (or a request's `logprobs_mode`) says what logprobs are:

| mode | of which logits | value |
|---|---|---|
| `raw_logprobs` | the model's, before anything is changed | log-softmax |
| `processed_logprobs` | what is sampled from: behind masks, bias, penalties, processors, temperature and filters | log-softmax |
| `raw_logits`, `processed_logits` | the same two | the logits themselves |

What is impossible has -9999. Prompts are not sampled from, so raw and processed are one for `prompt_logprobs`.
"""  # noqa: E501

PROCESSORS = """\
A package may change the logits of requests that ask for it by name. It registers a class in the entry-point group
`octavo.extensions`, as core does for `thinking_token_budget`:

```python
from octavo.plugin import hookimpl


@hookimpl
def register_extensions(registry):
    registry.logits_processor("favour", "my_package.favour:Favour")
```

```python
class Favour:
    def __init__(self, value, admit):  # one object for each request
        self.token = value

    @classmethod
    def check(cls, value, vocab_size):  # ValueError: the client gets 400
        if not isinstance(value, int) or not 0 <= value < vocab_size:
            raise ValueError("must be a token id")

    @classmethod
    def apply(cls, processors, logits, tokens, lengths):  # one call for all rows of a step that asked
        for row, processor in enumerate(processors):
            logits[row, processor.token] += 5.0
```

`SamplingParams(extra_args={"favour": 42})`, or `"vllm_xargs": {"favour": 42}` in a body, asks for it. A name that is
not installed is refused. An error in a processor ends its own request only. The contract: `LogitsProcessor` in
[the plugin API](hooks.md).
"""


def sampling_page() -> str:
    """All parameters with defaults and limits, then what goes beyond a table."""
    lines = [
        "# Sampling parameters",
        "",
        "Names and defaults are vLLM's. Offline they are fields of `SamplingParams`; in the API they are fields of the",
        "body. A value out of range is an error that names the field (400).",
        "",
        *table(SamplingParams),
        "",
        "## Logprobs",
        "",
        MODES,
        "## Beam search",
        "",
        *described(BeamSearchParams),
        "",
        "`LLM.beam_search(prompts, BeamSearchParams(...))` gives a `BeamSearchOutput` for each prompt; `sequences` are",
        "best first. In the API `use_beam_search` with `n` (and `best_of`) does. Penalties of the answer, bad words,",
        "structured outputs and logits processors cannot be combined with it and are refused.",
        "",
        "## Answers that repeat themselves",
        "",
        *described(RepetitionDetectionParams),
        "",
        "## Logits processors",
        "",
        PROCESSORS,
    ]
    return "\n".join(lines).rstrip() + "\n"


def entries(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> what the docstring says of it: paragraphs that begin with `name: ` or `name, name: `."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(struct) or "").splitlines():
        if match := re.match(r"((?:\w+, )*\w+): (.*)", line):
            names, text = match[1].split(", "), match[2]
        elif line.startswith("    ") and names:
            text = " " + line.strip()
        else:
            names = []
            continue
        for name in names:
            found[name] = found.get(name, "") + text
    return found


def table(struct: type[msgspec.Struct]) -> list[str]:
    """The fields as a Markdown table. Raises KeyError for a field that the docstring does not explain."""
    told = entries(struct)
    lines = ["| parameter | default | limits | |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        default = "" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`"
        lines.append(f"| `{field.name}` | {default} | {limits(field.name)} | {told[field.name]} |")
    return lines


def limits(name: str) -> str:
    """What a number may be."""
    if name not in RANGES:
        return ""
    _, low, high, above, _ = RANGES[name]
    if high is None:
        return f"{'above' if above else 'at least'} {low}"
    return f"{'above' if above else 'from'} {low} to {'2^63 - 1' if high > 2**60 else high}".replace(
        str(-(2**63)), "-2^63"
    )


def described(struct: type[msgspec.Struct]) -> list[str]:
    """A Struct's docstring with its name and fields."""
    fields = ", ".join(
        field.name if field.default is msgspec.NODEFAULT else f"{field.name}={field.default!r}"
        for field in msgspec.structs.fields(struct)
    )
    return ["```", f"{struct.__name__}({fields})", "```", "", inspect.getdoc(struct) or ""]
