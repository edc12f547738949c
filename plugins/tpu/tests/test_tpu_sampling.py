"""Filters against core's references, on plain torch and through torch_tpu."""

from __future__ import annotations

import torch

from octavo.ops.sampling import topk_topp as reference
from octavo_tpu.sampling import running_sum, topk_topp


def test_running_sums_are_those_of_torch(place: str) -> None:
    for size in (1, 2, 7, 64, 1000):
        x = torch.rand((3, size), generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(running_sum(x.to(place)).cpu(), x.cumsum(-1), atol=1e-5, rtol=1e-5)


def test_the_filter_keeps_what_the_reference_keeps(place: str) -> None:
    logits = torch.randn((6, 500), generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 100:110] = 3.0  # equal ones
    top_k = torch.tensor([0, 1, 5, 0, 40, 0])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.01, 0.999, 1.0])
    want = reference(logits.clone(), top_k, top_p)
    mine = logits.to(place)
    assert topk_topp(mine, top_k.to(place), top_p.to(place)) is mine
    assert torch.equal(mine.cpu().isinf(), want.isinf())
    torch.testing.assert_close(mine.cpu(), want)
