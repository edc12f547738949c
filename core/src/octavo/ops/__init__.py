"""Ops: every one has a plain-PyTorch reference here. Importing this package fills `catalogue.CATALOGUE`."""

from octavo.ops import activation, attention, bookkeeping, embedding, join, norm, residual, rope, sampling

__all__ = ["activation", "attention", "bookkeeping", "embedding", "join", "norm", "residual", "rope", "sampling"]
