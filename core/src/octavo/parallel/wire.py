"""A `Batch` or its `Masks` as one message for the other ranks, and back. Imports no torch.

msgpack maps of the dataclasses' fields; arrays are an extension that holds dtype, shape and bytes. Fields are not named
here, so that a new one travels as soon as it exists.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.plugin.step import Admit, Batch, BlockUpdate, Masks
from octavo.sampling.params import SamplingParams

ARRAY = 1
"""msgpack extension code."""
MASKS = b"\xc1"
"""A byte that no msgpack message begins with."""


def encode_batch(batch: Batch) -> bytes:
    """One message."""
    return _encoder.encode(batch)


def decode_batch(message: bytes) -> Batch:
    """The batch again; its arrays are its own."""
    fields = _decoder.decode(message)
    fields["admits"] = [_admit(**admit) for admit in fields["admits"]]
    fields["blocks"] = [BlockUpdate(**update) for update in fields["blocks"]]
    return Batch(**fields)


def encode_masks(masks: Masks) -> bytes:
    """One message, which `is_masks` tells from a batch."""
    return MASKS + _encoder.encode(masks)


def is_masks(message: bytes) -> bool:
    return message.startswith(MASKS)


def decode_masks(message: bytes) -> Masks:
    """The masks again."""
    return Masks(**_decoder.decode(message[len(MASKS) :]))


def _admit(*, params: Any, stop_ids: list[int], **rest: Any) -> Admit:
    return Admit(params=msgspec.convert(params, SamplingParams), stop_ids=tuple(stop_ids), **rest)


def _pack(value: object) -> object:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a step holds a {type(value).__name__}, which cannot be sent to other ranks")


def _unpack(code: int, data: memoryview) -> NDArray[Any]:
    assert code == ARRAY, f"unknown extension {code}"
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(content, dtype).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack)
