"""The ops before and after a model by the compiled library: the request table, and the choice of tokens.

Shapes: as `octavo.ops.bookkeeping` and `octavo.ops.sampling` say; N rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch

from octavo.plugin import YES, OpContext, Support, no
from octavo_cpu import native
from octavo_cpu.ops_native import DTYPES, address

Tensor = torch.Tensor


class SampleArgs(ctypes.Structure):
    """`octavo::SampleArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperature", "seeds", "positions", "rows", "tokens")),
        *((name, c_int64) for name in ("num_rows", "vocab", "stride")),
        ("dtype", c_int32),
        ("reserved", c_int32),
    )


class TopArgs(ctypes.Structure):
    """`octavo::TopArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "top_k", "top_p")),
        *((name, c_int64) for name in ("num_rows", "vocab", "stride")),
    )


class MinPArgs(ctypes.Structure):
    """`octavo::MinPArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "threshold")),
        *((name, c_int64) for name in ("num_rows", "vocab", "stride")),
    )


class BeginArgs(ctypes.Structure):
    """`octavo::BeginArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "blocks", "groups", "ended", "seqs", "q_starts", "ids", "positions")),
        *((name, c_void_p) for name in ("slots", "block_table", "picks")),
        *((name, c_int64) for name in ("num_tokens", "num_seqs", "num_rows", "num_columns", "num_groups")),
        *((name, c_int64) for name in ("row_tokens", "seqs_stride", "slots_stride", "table_stride", "picks_stride")),
    )


class CommitArgs(ctypes.Structure):
    """`octavo::CommitArgs`."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "ended", "limits", "stops", "chosen", "picks")),
        *((name, c_int64) for name in ("num_chosen", "num_stops", "row_tokens", "picks_stride")),
    )


def supports(context: OpContext) -> Support:
    """For ops whose numbers have one dtype whatever the model's is."""
    if context.device_type != "cpu":
        return no(f"needs a cpu device, not {context.device_type}")
    return YES


def rows_of(logits: Tensor) -> Tensor:
    """Logits [N, V] whose rows are contiguous, in a dtype that the library reads."""
    if logits.dtype not in (torch.bfloat16, torch.float32):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
    """As the catalogue's `sample`."""
    logits = rows_of(logits)
    tokens = native.empty((len(logits),), torch.int64)
    native.step_function("sample")(
        SampleArgs(
            logits.data_ptr(),
            temperature.data_ptr(),
            seeds.data_ptr(),
            positions.data_ptr(),
            address(rows),
            tokens.data_ptr(),
            *logits.shape,
            logits.stride(0),
            DTYPES[logits.dtype],
        )
    )
    return tokens


def greedy(logits: Tensor) -> Tensor:
    """As the catalogue's `greedy`."""
    logits = rows_of(logits)
    tokens = native.empty((len(logits),), torch.int64)
    shape = (*logits.shape, logits.stride(0), DTYPES[logits.dtype])
    native.step_function("sample")(SampleArgs(logits.data_ptr(), None, None, None, None, tokens.data_ptr(), *shape))
    return tokens


def topk_topp(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """As the catalogue's `topk_topp`, without a sort."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    shape = (*logits.shape, logits.stride(0))
    native.step_function("top")(TopArgs(logits.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), *shape))
    return logits


def min_p(logits: Tensor, threshold: Tensor) -> Tensor:
    """As the catalogue's `min_p`."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    native.step_function("min_p")(MinPArgs(logits.data_ptr(), threshold.data_ptr(), *logits.shape, logits.stride(0)))
    return logits


def begin_step(
    tokens: Tensor,
    blocks: Tensor,
    groups: Tensor,
    ended: Tensor,
    seqs: Tensor,
    q_starts: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    picks: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the catalogue's `begin_step`."""
    tensors = (tokens, blocks, groups, ended, seqs, q_starts, ids, positions, slots, block_table, picks)
    sizes = (len(ids), seqs.shape[1], len(tokens), blocks.shape[1], len(groups))
    strided = (tokens, seqs, slots, block_table, picks)
    native.step_function("begin")(BeginArgs(*(t.data_ptr() for t in tensors), *sizes, *(t.stride(0) for t in strided)))
    return seqs, ids, positions, slots, block_table, picks


def commit_tokens(
    tokens: Tensor, ended: Tensor, limits: Tensor, stops: Tensor, chosen: Tensor, picks: Tensor
) -> tuple[Tensor, Tensor]:
    """As the catalogue's `commit_tokens`."""
    tensors = (tokens, ended, limits, stops, chosen, picks)
    sizes = (len(chosen), stops.shape[1], tokens.stride(0), picks.stride(0))
    native.step_function("commit")(CommitArgs(*(t.data_ptr() for t in tensors), *sizes))
    return tokens, ended
