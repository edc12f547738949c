"""Sums between cards in a recorded step: NCCL beside one kernel that reads all cards' memory.

    PYTHONPATH=core/src:plugins/cuda/src python benchmarks/gpu_collectives.py [--ranks 2] [--seconds 60]

One process a card. First every sum is compared with NCCL's, in a replayed graph, then microseconds of one sum of
bfloat16 are printed as Markdown: `CALLS` of them in a graph, the median of `REPLAYS`. What it tells: `ONE_SHOT_BYTES`
of `octavo_cuda/communicator.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from octavo.plugin import GroupSpec
from octavo_cuda import communicator
from octavo_cuda.communicator import CudaCommunicator

SIZES_KIB = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CALLS, REPLAYS = 40, 11

Sum = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--seconds", type=float, default=60.0, help="that ranks wait for each other")
    options = parser.parse_args()
    # A free port of this host: the store of rank 0 would be known to the others only after they have started.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(rank_main, args=(options.ranks, store.port, options.seconds), nprocs=options.ranks)


def rank_main(rank: int, size: int, port: int, seconds: float) -> None:
    """One card's part."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    communicator.ONE_SHOT_BYTES[size] = max(SIZES_KIB) << 10
    comm = CudaCommunicator(GroupSpec(name="tp", ranks=tuple(range(size)), rank=rank, backend="nccl"), device)
    ways: dict[str, Sum] = {"NCCL": lambda t: in_place(t, comm)}
    if comm.one_shot is not None:
        ways["one shot"] = comm.one_shot
    lines = [f"| KiB | {' | '.join(ways)} |", "|---" * (1 + len(ways)) + "|"]
    for kib in SIZES_KIB:
        x = torch.randint(-8, 8, (kib << 9,), device=device).to(torch.bfloat16)
        expected = in_place(x.clone(), comm)
        cells = []
        for name, way in ways.items():
            if name != "NCCL":
                graph, found = recorded(lambda way=way, x=x: way(x))
                graph.replay()
                assert torch.equal(found, expected), f"{name} of {kib} KiB differs from NCCL's sum on rank {rank}"
            cells.append(f"{microseconds(way, torch.zeros_like(x)):.1f}")
        lines.append(f"| {kib} | {' | '.join(cells)} |")
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {size}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
        print("\n".join(lines))
    comm.close()
    dist.destroy_process_group()


def in_place(t: torch.Tensor, comm: CudaCommunicator) -> torch.Tensor:
    dist.all_reduce(t, group=comm.group)
    return t


def recorded(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of the call and what it leaves; run once before, outside."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        left = call()
    return graph, left


def microseconds(way: Sum, t: torch.Tensor) -> float:
    def calls() -> torch.Tensor:
        left = t
        for _ in range(CALLS):
            left = way(t)
        return left

    graph, _ = recorded(calls)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times) / CALLS


if __name__ == "__main__":
    main()
