"""Sums and joins of ranks on one CPU: through shared memory and by gloo, side by side.

    python benchmarks/cpu_collectives.py [--ranks 2] [--repeats 5]

One thread a rank. The two take turns; each number is the median of the repeats of the slowest rank's mean. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing

from octavo.plugin import GroupSpec
from octavo.plugin.torch import TorchCommunicator
from octavo_cpu.communicator import CpuCommunicator

SIZES = ((1, 576), (8, 576), (64, 576), (1, 2048), (64, 2048), (512, 2048), (2048, 2048))
"""Tokens and width of hidden states."""
SPAN_S = 0.2
"""About how long one measurement calls a collective for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, args=(args.ranks, port, args.repeats), nprocs=args.ranks)


def run(rank: int, size: int, port: int, repeats: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    spec = GroupSpec(name="tp", ranks=tuple(range(size)), rank=rank, backend="gloo")
    ours, gloo = CpuCommunicator(spec), TorchCommunicator(spec)
    if rank == 0:
        print(f"{size} ranks, bfloat16, microseconds a call\n\n| | tensor | shared memory | gloo | x |\n{'|---' * 5}|")
    for name in ("all_reduce", "all_gather"):
        for shape in SIZES:
            t = torch.zeros(shape, dtype=torch.bfloat16)
            args = (t,) if name == "all_reduce" else (t, 1)
            calls = [partial(getattr(comm, name), *args) for comm in (ours, gloo)]
            counts = [count_for(call, gloo) for call in calls]
            taken: list[list[float]] = [[], []]
            for _ in range(repeats):
                for found, call, count in zip(taken, calls, counts, strict=True):
                    found.append(slowest(mean(call, count, gloo), gloo))
            if rank == 0:
                new, old = (1e6 * statistics.median(found) for found in taken)
                print(f"| {name} | {shape[0]} x {shape[1]} | {new:.0f} | {old:.0f} | {old / new:.1f} |", flush=True)
    ours.close()


def count_for(call: Callable[[], object], comm: TorchCommunicator) -> int:
    """How many calls fill `SPAN_S`: the same on all ranks."""
    return max(3, int(SPAN_S / slowest(mean(call, 5, comm), comm)))


def mean(call: Callable[[], object], count: int, comm: TorchCommunicator) -> float:
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def slowest(seconds: float, comm: TorchCommunicator) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=comm.group)
    return float(found)


if __name__ == "__main__":
    main()
