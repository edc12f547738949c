"""From a step's logits to its tokens: penalties, masks, filters, choice and logprobs, each only when a row asks.

Order, as in vLLM: masks (grammar, allowed ids), bad words, min_tokens and bias, penalties, then for rows that are not
greedy temperature, min_p, top_k and top_p, then the choice. Logits processors come behind the penalties. Logprobs are
those of the model, before all of that, unless a request asks for processed ones.
Row state is set by `admit` and lives in arrays, so that a step touches no per-request object unless it asked for
something rare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.plugin.step import Admit, Masks
from octavo.sampling.logprobs import FoundLogprobs, LogprobRows
from octavo.sampling.penalties import PenaltyState
from octavo.sampling.processors import ProcessorRows
from octavo.speculate.places import Places

NEG_INF = float("-inf")
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
OPS = (
    "sample",
    "greedy",
    "penalties",
    "min_p",
    "topk_topp",
    "apply_bitmask",
    "logit_bias",
    "bad_words",
    "topk_logprobs",
)
HISTORY_PAD = -1

ALL_ALLOWED = -1
BIASED_AT_ONCE, PHRASES_AT_ONCE, PHRASE_WIDTH = 256, 64, 8
"""Where each number is a shape to compile, entries, phrases and their tokens come in multiples of these."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """tokens int64 [N], -1 where a row failed. errors: row -> why, where that is known."""

    tokens: Tensor
    logprobs: FoundLogprobs | None = None
    errors: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rare:
    """What few requests ask for, ready to be concatenated. Token ids int64, values float32."""

    bias_tokens: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    early_stops: NDArray[np.int64]
    min_tokens: int
    num_prompt_tokens: int
    phrases: tuple[tuple[int, ...], ...]
    allowed: NDArray[np.int32] | None


@dataclass
class Sampler:
    """Samples for the rows of a request table.

    ops: bound catalogue ops by name (`OPS`). tokens: the device's request table int32 [R, L], for bad words.
    upload: array -> tensor on the device; the runner sets one that does not wait. processors: name -> class.
    static: each shape is a program to compile, so work comes in few: logits have more rows than are sampled for, whose
    tokens mean nothing, and an operation on some rows works on as many as there are, on the last one again and again.
    """

    ops: dict[str, Callable[..., Any]]
    tokens: Tensor
    vocab_size: int
    device: torch.device
    processors: Mapping[str, type[Any]] = field(default_factory=dict)
    static: bool = False
    upload: Callable[[NDArray[Any]], Tensor] = field(init=False)
    penalty_state: PenaltyState = field(init=False)

    def __post_init__(self) -> None:
        self.upload = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        num_rows = self.tokens.shape[0]
        self.floats = np.zeros((num_rows, len(FLOATS)), np.float32)
        self.ints = np.zeros((num_rows, 2), np.int64)  # top_k, seed
        self.logprobs = LogprobRows(num_rows, self.vocab_size, self.ops["topk_logprobs"], static=self.static)
        self.processed = ProcessorRows(self.processors, self.tokens)
        self.penalised = np.zeros(num_rows, np.bool_)
        self.is_rare = np.zeros(num_rows, np.bool_)
        self.special = np.zeros(num_rows, np.bool_)  # anything but the most likely token or a draw at a temperature
        self.rare: dict[int, Rare] = {}
        # What a recorded step reads: the same temperature and seed, on the device.
        self.temperature = torch.zeros(num_rows, dtype=torch.float32, device=self.device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self.penalty_state = PenaltyState(self.vocab_size, self.device, num_places=num_rows if self.static else 0)

    def admit(self, admits: Sequence[Admit]) -> None:
        """Take over the parameters of new requests for their rows."""
        for admit in admits:
            self._admit(admit)
        if admits:
            rows = np.array([admit.row for admit in admits])
            index = self.upload(rows)
            self.temperature[index] = self.upload(self.floats[rows, 0])
            self.seeds[index] = self.upload(self.ints[rows, 1])

    def _admit(self, admit: Admit) -> None:
        row, params = admit.row, admit.params
        self.floats[row] = [getattr(params, name) for name in FLOATS]
        if params.greedy:
            self.floats[row, 0] = 0.0
        self.ints[row] = params.top_k if params.top_k < self.vocab_size else 0, admit.seed
        self.penalised[row] = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        if self.penalised[row]:
            self.penalty_state.admit(row, admit.token_ids, admit.num_prompt_tokens, self.upload)
        rare = _rare(admit, self.vocab_size)
        self.is_rare[row] = rare is not None
        if rare is not None:
            self.rare[row] = rare
        filtered = params.min_p > 0.0 or params.top_p < 1.0 or self.ints[row, 0] > 0
        watched = self.logprobs.admit(row, params) | self.processed.admit(admit)
        self.special[row] = (filtered and not params.greedy) or self.penalised[row] or rare is not None or watched

    def release(self, row: int) -> None:
        """Forget a row."""
        self.penalty_state.release(row)
        self.rare.pop(row, None)
        self.is_rare[row] = self.penalised[row] = self.special[row] = False
        self.logprobs.release(row)
        self.processed.release(row)

    def sample(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        masks: Masks | None = None,
        drafted: Places | None = None,
    ) -> Sampled:
        """One token for each of N rows. logits float32 [N, V], may be changed; positions [N]: of the new tokens.
        With `static` logits may have S >= N rows, and as many tokens come back.

        masks: their places are among the N. drafted: the N are places behind drafts, several of a row. Drafts lie in
        the request table already, where bad words read them.
        """
        places, late = self.logprobs.wanting(rows), self.logprobs.processed(rows)
        size = len(logits)
        # A copy, as what follows changes the logits in place.
        seen = logits[self._index(places, size)] if len(places) else None
        self._adjust(logits, rows, positions, masks, drafted)
        errors = self.processed.apply(logits, rows, positions, self.upload) if self.processed.any else {}
        tokens = self._choose(logits, rows, positions, scale=len(late) > 0)
        if self.penalised[rows].any():
            self._count(tokens, rows, drafted)
        if seen is None:
            return Sampled(tokens=tokens, errors=errors)
        if len(late):
            seen[self._index(np.searchsorted(places, late), size)] = logits[self._index(late, size)]
        of_rows = rows[self._sized(places, size)]
        found = self.logprobs.find(seen, tokens[self._index(places, size)], of_rows, places, self.upload)
        return Sampled(tokens=tokens, logprobs=found, errors=errors)

    def _sized(self, array: NDArray[Any], size: int) -> NDArray[Any]:
        """array [n, ...], n > 0; with `static` [size, ...], the last entry again and again: for work that may be done
        twice."""
        if not self.static or len(array) >= size:
            return array
        return np.concatenate((array, np.repeat(array[-1:], size - len(array), axis=0)))

    def _index(self, places: NDArray[Any], size: int) -> Tensor:
        """Places [n] among `size` rows, on the device."""
        return self.upload(self._sized(places, size))

    def _count(self, tokens: Tensor, rows: NDArray[np.int32], drafted: Places | None) -> None:
        """Count the tokens of the rows with penalties."""
        places = np.flatnonzero(self.penalised[rows])
        where = self._index(self.penalty_state.places(rows[places]), len(tokens))
        index = self._index(places, len(tokens))
        counted = None if drafted is None else self._reached(tokens, drafted)[index]
        if self.static:
            once = self.upload(np.arange(len(index)) < len(places))
            counted = once if counted is None else counted & once
        self.penalty_state.count(where, tokens[index], counted)

    def _reached(self, tokens: Tensor, drafted: Places) -> Tensor:
        """bool [N]: whether the tokens sampled before a place are its drafts, so that its own token counts."""
        wrong = (tokens != self.upload(drafted.expected)).to(torch.int64)
        before = wrong.cumsum(0) - wrong
        return before == before[self.upload(drafted.firsts)]

    def is_plain(self, rows: NDArray[np.int32]) -> bool:
        """Whether all rows want just the most likely token, or a draw at their temperature."""
        return not self.special[rows].any()

    def choose_plainly(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Tokens int64 [N] for `is_plain` rows int64 [N], from device state alone: the part that a recorded step holds.

        logits [N, V] in any dtype; positions int64 [N]: of the new tokens.
        """
        tokens: Tensor = self.ops["sample"](logits, self.temperature, self.seeds, positions, rows)
        return tokens

    def _choose(self, logits: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64], *, scale: bool) -> Tensor:
        """scale: leave logits as they are sampled from, after temperature and filters."""
        floats, ints = self.floats[rows], self.ints[rows]
        temperature, top_p, min_p, top_k = floats[:, 0], floats[:, 1], floats[:, 2], ints[:, 0]
        random = temperature > 0.0
        tokens: Tensor
        if not random.any():
            tokens = self.ops["greedy"](logits)
            return tokens
        cut_by_min = random & (min_p > 0.0)
        cut_by_top = random & ((top_p < 1.0) | (top_k > 0))
        if scale or cut_by_min.any() or cut_by_top.any():
            # Filters look at the distribution after temperature: scale now and draw at temperature 1.
            logits.div_(self._index(np.where(random, temperature, np.float32(1.0)), len(logits))[:, None])
            temperature = random.astype(np.float32)
            self._filter("min_p", logits, np.flatnonzero(cut_by_min), min_p)
            self._filter("topk_topp", logits, np.flatnonzero(cut_by_top), top_k, top_p)
        arguments = (temperature, ints[:, 1], positions.astype(np.int64))
        tokens = self.ops["sample"](logits, *(self._index(argument, len(logits)) for argument in arguments))
        return tokens

    def _filter(self, op: str, logits: Tensor, places: NDArray[np.int64], *params: NDArray[Any]) -> None:
        """Run a filter on the rows that ask for it only: sorting a vocabulary is dear."""
        if len(places) == 0:
            return
        arguments = [self._index(p[places], len(logits)) for p in params]
        if len(places) == len(logits) and not self.static:
            self.ops[op](logits, *arguments)
        else:
            index = self._index(places, len(logits))
            logits[index] = self.ops[op](logits[index], *arguments)

    def _adjust(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        masks: Masks | None,
        drafted: Places | None,
    ) -> None:
        rare = [(i, int(r), self.rare[int(r)]) for i, r in enumerate(rows) if self.is_rare[r]] if len(self.rare) else []
        allowed = [(i, entry.allowed) for i, _, entry in rare if entry.allowed is not None]
        if allowed:
            self._forbid(logits, np.array([i for i, _ in allowed]), np.stack([words for _, words in allowed]))
        if masks is not None:
            self._forbid(logits, masks.places, masks.words)
        if rare:
            self._forbid_phrases(logits, positions, rare)
            self._bias(logits, positions, rare)
        places = np.flatnonzero(self.penalised[rows])
        if len(places):
            places = self._sized(places, len(logits))
            index = self.upload(places)
            state, where = self.penalty_state, self.upload(self.penalty_state.places(rows[places]))
            counts, in_prompt = state.counts[where], state.in_prompt[where]
            if drafted is not None:
                which, ids = (self.upload(a) for a in drafted.history(places))
                counts.index_put_((which, ids), torch.ones_like(ids, dtype=counts.dtype), accumulate=True)
            presence, frequency, repetition = (self.upload(self.floats[rows[places], c]) for c in (3, 4, 5))
            logits[index] = self.ops["penalties"](logits[index], counts, in_prompt, presence, frequency, repetition)

    def _forbid(self, logits: Tensor, places: NDArray[Any], words: NDArray[np.int32]) -> None:
        """Apply masks [M, words] to the logits at places [M], ascending."""
        if self.static:  # all rows: no row may come twice here
            whole = np.full((len(logits), words.shape[1]), ALL_ALLOWED, np.int32)
            whole[places] = words
            places, words = np.arange(len(logits)), whole
        index = () if len(places) == len(logits) else (self.upload(places.astype(np.int64)),)
        self.ops["apply_bitmask"](logits, self.upload(words), *index)

    def _bias(self, logits: Tensor, positions: NDArray[np.int64], rare: list[tuple[int, int, Rare]]) -> None:
        places, tokens, values = [], [], []
        for i, _, entry in rare:
            places.append(np.full(len(entry.bias_tokens), i))
            tokens.append(entry.bias_tokens)
            values.append(entry.bias_values)
            if positions[i] - entry.num_prompt_tokens < entry.min_tokens:
                places.append(np.full(len(entry.early_stops), i))
                tokens.append(entry.early_stops)
                values.append(np.full(len(entry.early_stops), NEG_INF, np.float32))
        if num_entries := sum(map(len, tokens)):
            if self.static:  # further entries add nothing to the first token of the first row
                places.append(np.zeros(-num_entries % BIASED_AT_ONCE, np.int64))
                tokens.append(np.zeros(-num_entries % BIASED_AT_ONCE, np.int64))
                values.append(np.zeros(-num_entries % BIASED_AT_ONCE, np.float32))
            arguments = (np.concatenate(places), np.concatenate(tokens), np.concatenate(values))
            self.ops["logit_bias"](logits, *(self.upload(a) for a in arguments))

    def _forbid_phrases(self, logits: Tensor, positions: NDArray[np.int64], rare: list[tuple[int, int, Rare]]) -> None:
        phrases = [(i, row, entry, phrase) for i, row, entry in rare for phrase in entry.phrases]
        if not phrases:
            return
        width = max(1, max(len(p) - 1 for *_, p in phrases))
        if self.static:  # a phrase may be forbidden twice
            width = -(-width // PHRASE_WIDTH) * PHRASE_WIDTH
            phrases += phrases[-1:] * (-len(phrases) % PHRASES_AT_ONCE)
        prefixes = np.full((len(phrases), width), HISTORY_PAD, np.int64)
        for m, (*_, phrase) in enumerate(phrases):
            if len(phrase) > 1:
                prefixes[m, width - len(phrase) + 1 :] = phrase[:-1]
        rows = np.array([row for _, row, _, _ in phrases])
        where = positions[[i for i, *_ in phrases], None] + np.arange(-width, 0)
        generated = where >= np.array([entry.num_prompt_tokens for _, _, entry, _ in phrases])[:, None]
        table = self.tokens[self.upload(rows)[:, None], self.upload(where.clip(0))].to(torch.int64)
        history = torch.where(self.upload(generated), table, HISTORY_PAD)
        self.ops["bad_words"](
            logits,
            self.upload(np.array([i for i, *_ in phrases])),
            history,
            self.upload(prefixes),
            self.upload(np.array([len(p) - 1 for *_, p in phrases])),
            self.upload(np.array([p[-1] for *_, p in phrases])),
        )


def _words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def _rare(admit: Admit, vocab_size: int) -> Rare | None:
    params = admit.params
    bias = params.logit_bias or {}
    phrases = params.bad_words_ids
    stops = admit.stop_ids if params.min_tokens else ()
    if not (bias or phrases or stops or params.allowed_token_ids):
        return None
    allowed = None
    if params.allowed_token_ids:
        bits = np.zeros(_words(vocab_size) * 32, np.uint8)
        bits[list(params.allowed_token_ids)] = 1
        allowed = np.packbits(bits, bitorder="little").view("<i4")
    return Rare(
        bias_tokens=np.array(list(bias.keys()), np.int64),
        bias_values=np.array(list(bias.values()), np.float32),
        early_stops=np.array(stops, np.int64),
        min_tokens=params.min_tokens,
        num_prompt_tokens=admit.num_prompt_tokens,
        phrases=phrases,
        allowed=allowed,
    )
