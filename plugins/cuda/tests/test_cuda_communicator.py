"""Which sums go where, and why the fast way is left: with stand-ins for the kernel, and over gloo on CPUs."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.plugin import GroupSpec
from octavo_cuda import communicator
from octavo_cuda.communicator import ONE_SHOT_BYTES, CudaCommunicator, OneShot, agreed, attempted, missing_access

SIZE = 2


class Recorder:
    """Stands in for the kernel: copies, doubles (as two equal ranks would), remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, part: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.calls.append((part, t))
        assert part.shape == t.shape
        assert part.dtype == t.dtype
        part.copy_(t)
        return part * 2


@pytest.fixture
def kernel() -> Recorder:
    return Recorder()


@pytest.fixture
def one_shot(kernel: Recorder) -> OneShot:
    return OneShot(torch.zeros(1024), kernel)


def test_small_messages_are_summed_by_the_kernel_in_their_shape(one_shot: OneShot, kernel: Recorder) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        t = torch.arange(24, dtype=dtype).view(3, 8)
        got = one_shot(t)
        assert torch.equal(got, t * 2)
        assert got.dtype == dtype
    # Both dtypes use the same memory.
    assert kernel.calls[0][0].data_ptr() == kernel.calls[1][0].data_ptr()


@pytest.mark.parametrize(
    ("t", "taken"),
    [
        (torch.zeros(1024), True),
        (torch.zeros(1028), False),  # larger than the memory
        (torch.zeros(2048, dtype=torch.bfloat16), True),
        (torch.zeros(8, dtype=torch.float16), False),  # the kernel does not add it
        (torch.zeros(8, dtype=torch.int32), False),
        (torch.zeros(0), False),
        (torch.zeros(6, dtype=torch.bfloat16), False),  # 12 bytes
        (torch.zeros(16)[1:9], False),  # begins at byte 4
        (torch.zeros(16)[4:12], True),
        (torch.zeros(8, 8).t(), False),
    ],
)
def test_only_messages_that_the_kernel_can_move_are_taken(one_shot: OneShot, t: torch.Tensor, taken: bool) -> None:
    assert one_shot.takes(t) is taken


def test_cards_must_see_and_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = {(0, 1), (1, 0), (0, 2)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in reach)
    assert missing_access([0, 1], 0) == ""
    assert missing_access([0, 1, 2, 3], 0) == "card 0 has no peer access to card 3"
    assert missing_access([0, 0], 0) == "each process sees only its own card"
    assert missing_access([0, 1, 2], 0) == "the kernel is for 2, 4, 8 ranks, not 3"


def test_an_error_is_a_reason() -> None:
    def refuse() -> str:
        raise OSError("no handles")

    assert attempted(refuse) == "OSError: no handles"


# -- over gloo, in two processes --


def on_gloo(work: Any) -> list[Any]:
    """What `work(communicator)` returns on each of two ranks."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    other = context.Process(target=run_rank, args=(1, port, None, work, answers))
    other.start()
    try:
        run_rank(0, port, listener, work, answers)
        got = dict([answers.get(), answers.get()])
    finally:
        other.join(60)
        other.kill()
    return [got[rank] for rank in range(SIZE)]


def run_rank(rank: int, port: int, listener: socket.socket | None, work: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        SIZE,
        is_master=listener is not None,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    try:
        spec = GroupSpec(name="tp", ranks=(0, 1), rank=rank, backend="gloo")
        comm = CudaCommunicator(spec, torch.device("cpu"))
        answers.put((rank, work(comm)))
        comm.close()
    finally:
        dist.destroy_process_group()


def every_collective(comm: CudaCommunicator) -> dict[str, Any]:
    """Lists, as tensors would travel by shared memory."""
    rank, cpu = comm.rank, torch.device("cpu")
    t = torch.arange(8.0).view(2, 4) + 100 * rank
    found: dict[str, Any] = {
        "one_shot": comm.one_shot,
        "all_reduce": comm.all_reduce(t.clone()).tolist(),
        "all_gather 0": comm.all_gather(t, 0).tolist(),
        "all_gather 1": comm.all_gather(t.t().contiguous().t(), 1).tolist(),
        "reduce_scatter 0": comm.reduce_scatter(t, 0).tolist(),
        "reduce_scatter 1": comm.reduce_scatter(t, 1).tolist(),
        "all_to_all": comm.all_to_all(torch.arange(3.0) + 10 * rank, [1, 2], [1, 1] if rank == 0 else [2, 2]).tolist(),
        "broadcast": comm.broadcast(t.clone(), 1).tolist(),
    }
    comm.barrier()
    if rank == 0:
        comm.send(t, 1)
    else:
        found["recv"] = comm.recv(torch.empty(2, 4), 0).tolist()
    found["agreed none"] = agreed(comm, cpu, "")
    found["agreed one"] = agreed(comm, cpu, "no peer access" if rank == 1 else "")
    # The kernel takes what it can, gloo the rest.
    kernel = Recorder()
    comm.one_shot = OneShot(torch.zeros(16), kernel)
    found["small"] = comm.all_reduce(torch.ones(8)).tolist()
    found["large"] = comm.all_reduce(torch.ones(32)).tolist()
    found["calls"] = len(kernel.calls)
    # A kernel that is wrong on one rank is noticed.
    right = OneShot(torch.zeros(ONE_SHOT_BYTES[SIZE] // 4), lambda part, x: summed(comm, x))
    found["test right"] = communicator.self_test(right, comm, cpu)
    wrong = OneShot(torch.zeros(ONE_SHOT_BYTES[SIZE] // 4), lambda part, x: summed(comm, x) + (x.numel() == 1000))
    found["test wrong"] = communicator.self_test(wrong, comm, cpu)
    return found


def summed(comm: CudaCommunicator, x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total, group=comm.group)
    return total


def test_every_collective_gives_what_its_definition_says() -> None:
    first, second = on_gloo(every_collective)
    a = torch.arange(8.0).view(2, 4)
    b = a + 100
    for found in (first, second):
        assert found["one_shot"] is None
        assert found["all_reduce"] == (a + b).tolist()
        assert found["all_gather 0"] == torch.cat((a, b)).tolist()
        assert found["all_gather 1"] == torch.cat((a, b), dim=1).tolist()
        assert found["broadcast"] == b.tolist()
        assert (found["small"], found["large"], found["calls"]) == ([2.0] * 8, [2.0] * 32, 1)
        assert found["agreed none"] == ""
        assert found["test right"] == ""
        assert found["test wrong"] == "a sum of 1000 torch.bfloat16 differs from NCCL's"
    assert first["agreed one"] == "rank 1 has a reason against it, which it says"
    assert second["agreed one"] == "no peer access"
    assert first["reduce_scatter 0"] == (a + b)[:1].tolist()
    assert second["reduce_scatter 1"] == (a + b)[:, 2:].tolist()
    assert first["all_to_all"] == [0.0, 10.0]
    assert second["all_to_all"] == [1.0, 2.0, 11.0, 12.0]
    assert second["recv"] == a.tolist()
