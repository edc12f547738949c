"""Triton's gated activations, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import activation as reference
from octavo.ops.samples import gaussian

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import activation

# The interpreter computes with numpy, which warns where a chip silently takes the sigmoid's limit.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

KINDS = tuple(reference.ACTIVATIONS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 33), (3, 1500)])
def test_act_and_mul_is_the_references(kind: str, dtype: str, tolerance: float, tokens: int, width: int) -> None:
    x = gaussian(tokens, 2 * width, dtype=dtype, seed=1, scale=4.0)
    ours = activation.act_and_mul(x, kind)
    torch.testing.assert_close(ours, reference.act_and_mul(x, kind), atol=tolerance, rtol=tolerance)


def test_rows_may_be_strided() -> None:
    x = gaussian(4, 200, seed=1)[::2]
    torch.testing.assert_close(activation.act_and_mul(x, "silu"), reference.act_and_mul(x, "silu"))


@pytest.mark.parametrize("kind", KINDS)
def test_activations_stay_finite_far_from_zero(kind: str) -> None:
    x = torch.tensor([[-1e4, -50.0, 50.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(activation.act_and_mul(x, kind), reference.act_and_mul(x, kind), atol=1e-6, rtol=1e-6)
