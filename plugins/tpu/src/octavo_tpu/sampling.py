"""Filters of logits in operators that XLA compiles everywhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def topk_topp(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The op of core's catalogue, in place. torch_tpu's own prefix sum is an operation that XLA:CPU does not know, and
    to a TPU a window as wide as the vocabulary."""
    vocab = logits.shape[-1]
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    k = torch.where(top_k > 0, top_k, vocab)
    ordered = torch.where(rank >= k[:, None], float("-inf"), ordered)
    probs = ordered.softmax(dim=-1)
    drop = (running_sum(probs) - probs >= top_p[:, None]) & (top_p < 1.0)[:, None] & (rank > 0)
    return logits.scatter_(-1, index, torch.where(drop, float("-inf"), ordered))


def running_sum(x: Tensor) -> Tensor:
    """Inclusive prefix sums along the last dimension, by doubling distances (Hillis and Steele, 1986)."""
    distance = 1
    while distance < x.shape[-1]:
        x = x + pad(x[..., :-distance], (distance, 0))
        distance *= 2
    return x
