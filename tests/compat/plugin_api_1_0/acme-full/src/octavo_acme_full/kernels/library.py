"""The compiled kernels through ctypes. A call gives up the interpreter's lock."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

from torch import Tensor

PATH = Path(__file__).with_name("acme.so")


class Attention(ctypes.Structure):
    """`struct attention` of acme.c."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "seqs", "heads", "kv_heads", "dim", "block", "blocks_per_seq")),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    )


SIGNATURES: dict[str, list[Any]] = {
    "acme_rms_norm": [c_void_p] * 3 + [c_int64] * 2 + [c_float],
    "acme_linear": [c_void_p] * 4 + [c_int64] * 3,
    "acme_linear_groups": [c_void_p] * 5 + [c_int64] * 4,
    "acme_write": [POINTER(Attention)] + [c_void_p] * 5,
    "acme_attention": [POINTER(Attention)] + [c_void_p] * 8,
    "acme_sum": [c_void_p] * 2 + [c_int64] * 2,
}


def load() -> ctypes.CDLL:
    """The library, its functions declared. Raises OSError naming the file if it was not built."""
    library = ctypes.CDLL(str(PATH))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


LIBRARY = load()


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers lie; it must be contiguous, and live until the call returns. None stays None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
