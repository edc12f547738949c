"""References in 16 bits stay within the tolerance that their definitions promise, measured against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.catalogue import CATALOGUE, reference

MINE = [
    "rms_norm",
    "add_rms_norm",
    "scaled_add",
    "act_and_mul",
    "rope",
    "qkv_norm_rope",
    "qkv_norm_rope_write",
    "embedding",
    "embedding_part",
    "logits",
    "kv_write",
    "paged_attention",
]


def in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", MINE)
def test_reference_is_within_its_own_tolerance(name, dtype):
    op = CATALOGUE[name]
    tolerance = op.tolerance[dtype]
    samples = list(op.samples(dtype))
    again = list(op.samples(dtype))
    assert samples
    for args, copies in zip(samples, again, strict=True):
        want = reference(op.name)(*[in_float32(a) for a in copies])
        got = reference(op.name)(*args)
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for g, w in pairs:
            torch.testing.assert_close(g.float(), w, atol=tolerance, rtol=tolerance)
