"""The tokenizer inside a GGUF file: its metadata has the vocabulary, merges or scores, special ids and chat template.

Two kinds of vocabulary are known: "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names how text is cut into words) and
"llama" (sentencepiece BPE with byte fallback).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.tokenizer_backends import FastBackend, TokenizerParts
from octavo.weights.gguf_header import read_header

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Values of `tokenizer.ggml.token_type`."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{0}}"

LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = rf"{CASED.replace('{0}', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
GPT4O = rf"{CASED.replace('{0}', CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"

LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2")
SPLITS = (
    dict.fromkeys(LLAMA3_NAMES, LLAMA3)
    | dict.fromkeys(("dbrx", "smaug-bpe"), LLAMA3)
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), QWEN2)
    | dict.fromkeys(("gpt-4o", "llama4"), GPT4O)
    | {"tekken": TEKKEN}
)
"""The regular expression that cuts words, by `tokenizer.ggml.pre`."""

GPT2_NAMES = frozenset({"default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "roberta-bpe"})
"""Vocabularies cut by GPT-2's expression, which `tokenizers` has built in."""

GPT2_DIGITS_NAMES = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""The same, after every digit was cut off as a word of its own."""

WHOLE_WORDS_NAMES = frozenset({*LLAMA3_NAMES, "tekken"})
"""Vocabularies in which a word that is a token is not merged from its pieces."""


ENDS_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<end_of_turn>"})


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Build the tokenizer of a GGUF file. Raises CheckpointError for a bad file, UnsupportedModelError for a kind of
    vocabulary that is not known."""
    metadata = dict(read_header(path).metadata)
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if key in metadata:
            metadata[key] = np.array(metadata[key])
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens or model is None:
        raise CheckpointError("holds no tokenizer (no tokenizer.ggml.tokens); use --tokenizer", path=str(path))
    if model == "gpt2":
        tokenizer = _byte_level(metadata, path)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, path)
    else:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.model is {model!r}; gpt2 and llama are supported. Use --tokenizer"
        )
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    roles = _roles(metadata, path)
    _add_bos_and_eos(tokenizer, metadata, roles)
    return TokenizerParts(
        backend=FastBackend(tokenizer),
        special_tokens=roles,
        eos_token_ids=_ends_of_turn(metadata),
        chat_templates=_templates(metadata),
    )


def _byte_level(metadata: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        logger.warning("%s does not name its pre-tokenizer (tokenizer.ggml.pre): GPT-2's is used", path)
        pre = "default"
    words: pre_tokenizers.PreTokenizer
    if pre in GPT2_NAMES:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in GPT2_DIGITS_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = pre_tokenizers.Sequence([split, bytes_])
    else:
        known = ", ".join(sorted({*GPT2_NAMES, *GPT2_DIGITS_NAMES, *SPLITS}))
        raise UnsupportedModelError(
            f"{path}: pre-tokenizer {pre!r} is not known (known: {known}). Use --tokenizer with a tokenizer.json"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError("has no tokenizer.ggml.merges", path=str(path))
    vocab = _vocab(metadata["tokenizer.ggml.tokens"])
    pairs = _known_pairs([tuple(merge.split(" ", 1)) for merge in merges], vocab, path)
    bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in WHOLE_WORDS_NAMES)
    tokenizer = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds, scores = metadata.get("tokenizer.ggml.token_type"), metadata.get("tokenizer.ggml.scores")
    if scores is None or kinds is None or not len(scores) == len(kinds) == len(tokens):
        raise CheckpointError("needs one tokenizer.ggml.scores and token_type for each token", path=str(path))
    unknown = next((tokens[i] for i in np.flatnonzero(kinds == UNKNOWN).tolist()), None)
    if unknown is None and "tokenizer.ggml.unknown_token_id" in metadata:
        unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    bpe = models.BPE(
        vocab=_vocab(tokens),
        merges=merges_from_scores(tokens, kinds, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(tokens: Sequence[str], kinds: np.ndarray, scores: np.ndarray) -> list[tuple[str, str]]:
    """The BPE merges that a sentencepiece vocabulary implies: sentencepiece joins the neighbours whose join has the
    best score, so every split of a piece into two pieces is a merge, ranked by the score of the piece."""
    normal = np.flatnonzero(kinds == NORMAL)
    ranked = [tokens[i] for i in normal[np.argsort(-scores[normal], kind="stable")].tolist()]
    pieces = set(ranked)
    return [
        (left, right)
        for piece in ranked
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
    ]


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; of tokens with the same text the first counts."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    return vocab


def _known_pairs(merges: list[tuple[str, ...]], vocab: Mapping[str, int], path: Path) -> list[tuple[str, str]]:
    pairs = [(m[0], m[1]) for m in merges if len(m) == 2 and m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab]
    if len(pairs) != len(merges):
        raise CheckpointError(
            f"{len(merges) - len(pairs)} of its {len(merges)} merges do not join two tokens to a token", path=str(path)
        )
    return pairs


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], kinds: np.ndarray | None) -> None:
    """Tokens that are matched whole in a text: control tokens (special) and user-defined ones."""
    if kinds is None:
        return
    for kind, special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
        found = [tokens[i] for i in np.flatnonzero(kinds == kind).tolist() if tokens[i]]
        added = [AddedToken(text, normalized=False, special=special) for text in found]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _roles(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Special tokens by role. A key that is absent means the model has no such token: nothing is guessed."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    roles = {}
    for role, name in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{name}_token_id {token_id} is not in its vocabulary", path=str(path))
        roles[role] = tokens[token_id]
    return roles


def _ends_of_turn(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens beyond EOS. A file that names no end of turn has it under one of a few texts, if at all; a chat
    model would run on without it."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    if ends[0] is None:
        kinds = metadata.get("tokenizer.ggml.token_type", np.empty(0, np.int32))
        ends += [i for i in np.flatnonzero(kinds == CONTROL).tolist() if tokens[i] in ENDS_OF_TURN]
    return tuple(end for end in ends if end is not None and end < len(tokens))


def _add_bos_and_eos(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    """Without a flag, BOS is added by sentencepiece vocabularies and by Llama 3's, as those models were trained."""
    pre, model = metadata.get("tokenizer.ggml.pre"), metadata["tokenizer.ggml.model"]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in LLAMA3_NAMES)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    bos = roles.get("bos_token") if add_bos else None
    eos = roles.get("eos_token") if add_eos else None
    pieces = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys([bos, eos]) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for further ones."""
    prefix = "tokenizer.chat_template"
    templates = {key[len(prefix) + 1 :]: value for key, value in metadata.items() if key.startswith(prefix + ".")}
    if prefix in metadata:
        templates["default"] = metadata[prefix]
    return templates
