"""Collectives of a group of ranks: the trivial one, and the default over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.plugin.data import GroupSpec


class SingleRank:
    """The communicator of a group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, t: Tensor) -> Tensor:
        return t

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        return t

    def reduce_scatter(self, t: Tensor, dim: int) -> Tensor:
        return t

    def all_to_all(self, t: Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor:
        return t

    def broadcast(self, t: Tensor, src: int) -> Tensor:
        return t

    def send(self, t: Tensor, dst: int) -> None:
        raise AssertionError("a group of one has nobody to send to")

    def recv(self, like: Tensor, src: int) -> Tensor:
        raise AssertionError("a group of one has nobody to receive from")

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing is held."""


class TorchCommunicator:
    """Collectives over a torch.distributed process group; the default process group must be initialised.

    Ranks in `src` and `dst` are places in the group. Tensors keep their dtype; all_reduce works in place.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self.rank = spec.rank
        self.size = spec.size
        self._ranks = spec.ranks
        self._group = dist.new_group(list(spec.ranks), backend=spec.backend)

    def all_reduce(self, t: Tensor) -> Tensor:
        dist.all_reduce(t, group=self._group)
        return t

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        """Pieces of equal shape, joined along `dim` in rank order."""
        pieces = t.new_empty((self.size, *t.shape))
        dist.all_gather_into_tensor(pieces, t.contiguous(), group=self._group)
        return torch.cat(pieces.unbind(0), dim=dim)

    def reduce_scatter(self, t: Tensor, dim: int) -> Tensor:
        """The sum's piece of this rank along `dim`, whose size the group size must divide."""
        pieces = torch.stack(t.chunk(self.size, dim=dim)).contiguous()
        out = torch.empty_like(pieces[0])
        dist.reduce_scatter_tensor(out, pieces, group=self._group)
        return out

    def all_to_all(self, t: Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor:
        """Rows of t [sum(in_splits), ...] go to ranks in order; returns [sum(out_splits), ...]."""
        out = t.new_empty((sum(out_splits), *t.shape[1:]))
        dist.all_to_all_single(out, t.contiguous(), list(out_splits), list(in_splits), group=self._group)
        return out

    def broadcast(self, t: Tensor, src: int) -> Tensor:
        dist.broadcast(t, src=self._ranks[src], group=self._group)
        return t

    def send(self, t: Tensor, dst: int) -> None:
        dist.send(t.contiguous(), dst=self._ranks[dst], group=self._group)

    def recv(self, like: Tensor, src: int) -> Tensor:
        out = torch.empty_like(like)
        dist.recv(out, src=self._ranks[src], group=self._group)
        return out

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)
