"""Collectives between cards: NCCL for everything, and one kernel for the small sums of decode steps.

A decode step sums a few KiB to a few hundred KiB twice a layer. NCCL passes them around a ring; `OneShot` lets every
card read the others' memory at once and add in rank order, so that all ranks get the same bits:

    copy in ─> signal, wait for all ─> read all ranks, add ─> signal, wait for all      one kernel, recordable

It is torch's symmetric memory (`torch.ops.symm_mem.one_shot_all_reduce_copy`, torch 2.8 or later), without multicast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from octavo.plugin import GroupSpec
from octavo.plugin.torch import TorchCommunicator

log = logging.getLogger("octavo.cuda")

ONE_SHOT_BYTES = {2: 2 << 20, 4: 256 << 10, 8: 128 << 10}
"""Ranks -> largest message that one kernel sums: each rank reads (ranks - 1) times the message, in a ring about twice.
That of 2 is measured on H200s (6.7 us against NCCL's 15.8 for 8 KiB, 21 against 36 for 2 MiB), the others are not:
`benchmarks/gpu_collectives.py`. For other numbers of ranks the kernel adds in an order that differs between them."""
DTYPES = (torch.bfloat16, torch.float32)
"""What the kernel adds."""
ALIGNMENT = 16
"""Bytes that the kernel moves at once."""


class CudaCommunicator(TorchCommunicator):
    """Implements `octavo.plugin.Communicator` for one card of a group. `one_shot` is None where it cannot be used."""

    one_shot: OneShot | None = None

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        if device.type == "cuda":
            self.one_shot = make_one_shot(self, device)

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """The sum over ranks: in place or, for small messages, a new tensor."""
        one_shot = self.one_shot
        if one_shot is not None and one_shot.takes(t):
            return one_shot(t)
        return super().all_reduce(t)

    def close(self) -> None:
        self.one_shot = None
        super().close()


class OneShot:
    """Small all-reduces in one kernel. Every rank makes one at the same time and calls it with the same shapes.

    memory: float32, as large as the largest message, readable by all ranks.
    reduce: (part of the memory [n], contiguous t [n]) -> the sum [n]; it copies t to the memory itself.
    """

    def __init__(self, memory: torch.Tensor, reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._views = {dtype: memory.view(dtype) for dtype in DTYPES}
        self._max_bytes = memory.numel() * memory.element_size()
        self._reduce = reduce

    def takes(self, t: torch.Tensor) -> bool:
        """Whether the message is small and aligned enough, and of a dtype that the kernel adds."""
        size = t.element_size()
        num_bytes = t.numel() * size
        return (
            0 < num_bytes <= self._max_bytes
            and num_bytes % ALIGNMENT == 0
            and t.storage_offset() * size % ALIGNMENT == 0
            and t.dtype in self._views
            and t.is_contiguous()
        )

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        flat = t.view(-1)
        return self._reduce(self._views[t.dtype][: flat.numel()], flat).view(t.shape)


def make_one_shot(comm: TorchCommunicator, device: torch.device) -> OneShot | None:
    """For this group, or None with a warning that says why not. Ranks decide each step together: none waits alone."""
    one_shot: OneShot | None = None

    def make() -> str:
        nonlocal one_shot
        one_shot = symmetric(comm, device)
        return ""

    def test() -> str:
        assert one_shot is not None
        return self_test(one_shot, comm, device)

    cards = comm.all_gather(torch.tensor([device.index], device=device), 0).tolist()
    for attempt in (lambda: missing_access(cards, device.index), make, test):
        if reason := agreed(comm, device, attempted(attempt)):
            log.warning("small sums go through NCCL as well, which makes decode steps longer: %s", reason)
            return None
    return one_shot


def missing_access(cards: Sequence[int], own: int) -> str:
    """Why this card cannot read the memory of the group's others; empty if it can."""
    if len(cards) not in ONE_SHOT_BYTES:
        return f"the kernel is for {', '.join(map(str, ONE_SHOT_BYTES))} ranks, not {len(cards)}"
    if len(set(cards)) < len(cards):
        return "each process sees only its own card"
    blind = [card for card in cards if card != own and not torch.cuda.can_device_access_peer(own, card)]
    return f"card {own} has no peer access to card {', '.join(map(str, blind))}" if blind else ""


def symmetric(comm: TorchCommunicator, device: torch.device) -> OneShot:
    """Take the memory and exchange its addresses."""
    import torch.distributed._symmetric_memory as symm_mem

    memory = symm_mem.empty(ONE_SHOT_BYTES[comm.size] // 4, dtype=torch.float32, device=device)
    group = comm.group.group_name
    symm_mem.rendezvous(memory, group)
    kernel: Any = torch.ops.symm_mem.one_shot_all_reduce_copy
    return OneShot(memory, lambda part, t: kernel(part, t, "sum", group))


def self_test(one_shot: OneShot, comm: TorchCommunicator, device: torch.device) -> str:
    """What differs from NCCL's sums; empty if nothing does. The numbers are whole and small, so sums are exact."""
    for numel in (64, 4096, ONE_SHOT_BYTES[comm.size] // 4, 1000, 4096):
        for dtype in DTYPES:
            numbers = (torch.arange(numel, device=device) * 7 + comm.rank * 3) % 17 - 8
            t = numbers.to(dtype)
            want = t.clone()
            dist.all_reduce(want, group=comm.group)
            if not torch.equal(one_shot(t), want):
                return f"a sum of {numel} {dtype} differs from NCCL's"
    return ""


def attempted(attempt: Callable[[], str]) -> str:
    """What the attempt returns, or the error that it raises: either way a reason for the log."""
    try:
        return attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def agreed(comm: TorchCommunicator, device: torch.device, reason: str) -> str:
    """This rank's reason against, else that another rank has one; empty on all ranks if none has."""
    against = comm.all_gather(torch.tensor([bool(reason)], dtype=torch.int32, device=device), 0).tolist()
    if reason or not any(against):
        return reason
    return f"rank {against.index(1)} has a reason against it, which it says"
