"""Collectives of a group of ranks: the trivial one, the processes behind the others, and what core does with them.

`octavo.plugin.torch.TorchCommunicator` is the default for more than one rank.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import ConfigError
from octavo.plugin.contracts import Communicator

LOCALHOST = "127.0.0.1"
JOIN_S = 120.0
"""All ranks join at the same time; one that has not by then never will."""


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


def join(rank: int, size: int, *, backend: str, port: int, listener: socket.socket | None = None) -> None:
    """Become `rank` of the default process group of torch.distributed. All ranks call it at about the same time.

    port: of rank 0 on this machine; listener: rank 0's socket on it. Only this machine can reach it.
    Raises ConfigError if this process is in a process group already, DistStoreError if others do not come.
    """
    if dist.is_initialized():
        raise ConfigError(
            "tensor_parallel_size: torch.distributed is in use in this process (by another engine with ranks, or by "
            "your own code), and it allows one group of processes; close the other engine, or use another process"
        )
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOCALHOST,
        port,
        size,
        is_master=listener is not None,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def leave() -> None:
    """Undo `join`; every rank does it at the end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """Undo `join` without the others, of whom one is gone: collectives that wait for it end with an error."""
    if not dist.is_initialized():
        return
    try:
        dist.distributed_c10d._abort_process_group()
    except RuntimeError:  # gloo cannot abort in every version of torch; its collectives end with their connections
        dist.destroy_process_group()


def open_channels(comm: Communicator, device: torch.device) -> None:
    """Use what a step will use, so that connections and their memory exist before KV memory is measured."""
    ones = torch.ones(comm.size, dtype=torch.float32, device=device)
    comm.all_gather(comm.all_reduce(ones), 0)


def least(value: int, comm: Communicator, device: torch.device) -> int:
    """The smallest of the ranks' values."""
    if comm.size == 1:
        return value
    return int(comm.all_gather(torch.tensor([value], dtype=torch.int64, device=device), 0).min())
