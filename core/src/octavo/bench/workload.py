"""The seeded work that is measured: prompts, and how many tokens each is answered with.

The same arguments give the same token ids on every machine and version (frozen by a test), so that engines and days
can be compared. Prompts of one source are all distinct: a prefix cache never helps.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

IDS = (10, 30000)
"""Token ids are drawn from here (the end is excluded): valid in nearly every vocabulary."""
DATASETS = ("random", "skewed", "sharegpt")
RANDOM_LENGTHS = (1024, 128)
"""Prompt and output tokens of `random` where nobody says otherwise."""
WARMUP_SEED = 0xF01D
"""Warm-up prompts come from a source of their own, so that they neither shift nor repeat (and so cache) what is
measured. Not a negative number: Python's generator takes the absolute value."""
WARMUP_LENGTHS = (64, 8)
"""Prompt and output tokens of a warm-up request."""
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
"""Conversations outside are left out: too short to mean anything, or too long for a common context."""


@dataclass(frozen=True)
class Work:
    """One request: prompt token ids, how many tokens to generate, and the prompt as text if that is what it was."""

    prompt: list[int]
    num_output: int
    text: str | None = None


class Source:
    """Draws requests from one seed. ids: token ids from the first up to, not including, the second."""

    def __init__(self, seed: int = 0, *, ids: tuple[int, int] = IDS) -> None:
        self._random = random.Random(seed)
        self._ids = ids

    def fixed(self, num_prompt: int, num_output: int) -> Work:
        """A request of exactly these lengths."""
        return Work(self._prompt(num_prompt), num_output)

    def mix(self, count: int = 64) -> list[Work]:
        """Chat-like requests: prompts of 32-512 and outputs of 32-256 tokens, uniform."""
        lengths = [(self._random.randint(32, 512), self._random.randint(32, 256)) for _ in range(count)]
        return [self.fixed(*pair) for pair in lengths]

    def skewed(self, count: int = 1000) -> list[Work]:
        """Many requests as chat traffic is skewed: prompts of 32-1024 and outputs of 32-512 tokens, log-uniform."""
        # The order of the draws is part of the definition: prompt length, its ids, output length.
        return [Work(self._prompt(self._log_uniform(32, 1024)), self._log_uniform(32, 512)) for _ in range(count)]

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(*self._ids) for _ in range(length)]

    def _log_uniform(self, low: int, high: int) -> int:
        return int(math.exp(self._random.uniform(math.log(low), math.log(high))))


def ids_within(vocab_size: int | None) -> tuple[int, int]:
    """The range of ids for a vocabulary: the usual one unless it is smaller. Raises ConfigError below 11 tokens."""
    low, high = IDS
    if vocab_size is None or vocab_size >= high:
        return IDS
    if vocab_size <= low:
        raise ConfigError(f"vocab_size is {vocab_size}; prompts are drawn from ids {low} and up, so it must be larger")
    return low, vocab_size


def make_work(
    dataset: str,
    *,
    num_prompts: int,
    seed: int = 0,
    input_len: int | None = None,
    output_len: int | None = None,
    vocab_size: int | None = None,
    path: Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[Work]:
    """The requests of a dataset of `DATASETS`.

    random: `input_len` and `output_len` tokens each. skewed: see `Source.skewed`. sharegpt: the first question of
    each conversation in the JSON file `path`, answered with as many tokens as its answer there has, or `output_len`.
    vocab_size: of the model, where it is known. Raises ConfigError naming what does not fit together.
    """
    check_dataset(dataset, input_len=input_len, output_len=output_len, path=path)
    if dataset == "sharegpt":
        assert path is not None
        if tokenizer is None:
            raise ConfigError("sharegpt needs a tokenizer, to count tokens")
        return read_sharegpt(path, tokenizer, num_prompts=num_prompts, seed=seed, output_len=output_len)
    source = Source(seed, ids=ids_within(vocab_size))
    if dataset == "skewed":
        return source.skewed(num_prompts)
    lengths = (input_len or RANDOM_LENGTHS[0], output_len or RANDOM_LENGTHS[1])
    return [source.fixed(*lengths) for _ in range(num_prompts)]


def check_dataset(dataset: str, *, input_len: int | None, output_len: int | None, path: Path | None) -> None:
    """Raise ConfigError for settings that a dataset lacks or would ignore: cheap, so before a model is loaded."""
    if dataset not in DATASETS:
        raise ConfigError(f"dataset_name is {dataset!r}, must be one of {', '.join(DATASETS)}")
    if dataset == "sharegpt" and path is None:
        raise ConfigError("sharegpt needs dataset_path: the JSON file")
    if dataset != "sharegpt" and path is not None:
        raise ConfigError(f"dataset_path is read for --dataset-name sharegpt, not for {dataset}: leave one of them out")
    if dataset != "random" and input_len is not None:
        raise ConfigError(f"input_len has no meaning for {dataset}, which brings its own prompts: leave it out")
    if dataset == "skewed" and output_len is not None:
        raise ConfigError("output_len has no meaning for skewed, which draws its own lengths: leave it out")


def read_sharegpt(
    path: Path, tokenizer: Tokenizer, *, num_prompts: int, seed: int, output_len: int | None
) -> list[Work]:
    """First questions of the conversations of a file, in seeded order.

    The file is a JSON list of {"conversations": [{"value": question}, {"value": answer}, ...]}.
    Raises ConfigError if it is no such file or holds too few conversations of usable length.
    """
    pairs = list(first_turns(read_json_list(path), path))
    random.Random(seed).shuffle(pairs)
    work: list[Work] = []
    for question, answer in pairs:
        if len(work) == num_prompts:
            break
        ids = tokenizer.encode(question)
        num_output = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        usable = MIN_TOKENS <= len(ids) <= MAX_PROMPT and len(ids) + num_output <= MAX_TOTAL
        if usable and (output_len or num_output >= MIN_TOKENS):
            work.append(Work(ids, num_output, question))
    if len(work) < num_prompts:
        raise ConfigError(
            f"{path} holds {len(work)} conversations of usable length "
            f"(question {MIN_TOKENS}-{MAX_PROMPT} tokens, with its answer at most {MAX_TOTAL}): lower num_prompts"
        )
    return work


def read_json_list(path: Path) -> list[Any]:
    """Raises ConfigError naming the file."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset_path: {path} cannot be read as JSON: {error}") from error
    if not isinstance(data, list):
        raise ConfigError(f"dataset_path: {path} must hold a JSON list of conversations, not a {type(data).__name__}")
    return data


def first_turns(data: list[Any], path: Path) -> Iterator[tuple[str, str]]:
    """(question, answer) of every conversation that has both."""
    for index, entry in enumerate(data):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f"dataset_path: entry {index} of {path} has no list 'conversations'")
        values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if len(values) == 2:
            question, answer = values
            if not isinstance(question, str) or not isinstance(answer, str):
                raise ConfigError(f"dataset_path: a turn of entry {index} of {path} has no text 'value'")
            yield question, answer
