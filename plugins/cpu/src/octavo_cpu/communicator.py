"""Collectives of ranks on one machine: sums and joins through shared memory, everything else by gloo.

    rank 0           makes the memory       joins   removes its name
    other ranks                learn its name   join

A decode step of a small model has two sums a layer of a few kilobytes; through sockets each costs as much as a product.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import secrets

import torch

from octavo.plugin import GroupSpec
from octavo.plugin.torch import TorchCommunicator
from octavo_cpu import native

log = logging.getLogger(__name__)

Tensor = torch.Tensor

NAME_BYTES = 10
"""macOS allows names of 31 characters."""
NO_GROUP = 0
SUMMED = {torch.bfloat16: native.DTYPES.index("bfloat16"), torch.float32: native.DTYPES.index("float32")}
"""Dtypes that the library adds."""


class AllReduceArgs(ctypes.Structure):
    """`octavo::AllReduceArgs`."""

    _fields_ = (
        ("group", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class AllGatherArgs(ctypes.Structure):
    """`octavo::AllGatherArgs`."""

    _fields_ = (
        ("group", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("all", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class CpuCommunicator(TorchCommunicator):
    """A `Communicator` whose `all_reduce` (bfloat16, float32) and `all_gather` go through shared memory if all ranks
    could join it; if not, the log says why and gloo does it all.

    All ranks get the same bits: they add in float32, in the order of the ranks. A rank that is gone is noticed within
    some tens of milliseconds of waiting for it; then every collective raises ConnectionError.
    """

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        self._group = self._join()
        self._reduce = native.step_function("all_reduce")
        self._gather = native.step_function("all_gather")

    def _join(self) -> int:
        """Address of the library's group; NO_GROUP, on every rank, if one rank cannot join."""
        library = native.load()
        key = torch.frombuffer(bytearray(secrets.token_bytes(NAME_BYTES)), dtype=torch.uint8)
        if self.rank != 0:
            self.broadcast(key, 0)
        name = f"/octavo-{bytes(key.tolist()).hex()}".encode()
        error = ctypes.c_int()
        group = library.octavo_group_open(name, self.rank, self.size, ctypes.byref(error)) or NO_GROUP
        if self.rank == 0:
            self.broadcast(key, 0)
        everyone = bool(super().all_gather(torch.tensor([group != NO_GROUP]), 0).all())
        if self.rank == 0:
            library.octavo_group_unlink(name)
        if group == NO_GROUP:
            reason = os.strerror(error.value)
            log.warning("rank %d cannot share memory with the others (%s): tensors go through gloo", self.rank, reason)
        elif not everyone:
            library.octavo_group_close(group)
        return group if everyone else NO_GROUP

    def all_reduce(self, t: Tensor) -> Tensor:
        """In place."""
        if self._group == NO_GROUP or t.dtype not in SUMMED or not t.is_contiguous():
            return super().all_reduce(t)
        self._reduce(AllReduceArgs(self._group, t.data_ptr(), t.numel(), SUMMED[t.dtype], 0))
        check_ranks()
        return t

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        """Pieces of equal shape, joined along `dim` in rank order."""
        if self._group == NO_GROUP:
            return super().all_gather(t, dim)
        own, dim = t.contiguous(), dim % max(1, t.dim())
        rows = math.prod(own.shape[:dim])
        out = native.empty((*own.shape[:dim], self.size * own.shape[dim], *own.shape[dim + 1 :]), own.dtype)
        if own.numel():
            row_bytes = own.numel() // rows * own.element_size()
            self._gather(AllGatherArgs(self._group, own.data_ptr(), out.data_ptr(), rows, row_bytes))
            check_ranks()
        return out

    def close(self) -> None:
        if self._group != NO_GROUP:
            native.load().octavo_group_close(self._group)
            self._group = NO_GROUP
        super().close()


def check_ranks() -> None:
    """Raise ConnectionError if a rank of this process's group is gone: what collectives gave since is undefined."""
    if (rank := native.load().octavo_lost_rank()) >= 0:
        raise ConnectionError(errno.ECONNRESET, f"the process of rank {rank} ended while this rank waited for it")
