"""Which cores and which memory node a worker gets, on machines made of folders; and that this system follows."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import octavo_cpu
from octavo.config import make_config
from octavo_cpu import host, native, placement
from octavo_cpu.device import CpuDevice
from octavo_cpu.placement import ANYWHERE, Place, parse, place_of

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes one: nodes with a list of CPUs each, of which n and n + half are hyper-threads of one core."""

    def make(*nodes: str, allowed: str | None = None, quota: int | None = None) -> None:
        cpus = sorted(cpu for near in nodes for cpu in host.cpu_list(near))
        for number, near in enumerate(nodes):
            (tmp_path / f"node/node{number}").mkdir(parents=True)
            (tmp_path / f"node/node{number}/cpulist").write_text(near + "\n")
        for cpu in cpus:
            topology, core = tmp_path / f"cpu/cpu{cpu}/topology", cpu % (len(cpus) // 2)
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{core},{core + len(cpus) // 2}\n")
        usable = cpus if allowed is None else host.cpu_list(allowed)
        monkeypatch.setattr(host, "allowed_cpus", lambda: usable)
        monkeypatch.setattr(host, "cpu_quota", lambda: quota)
        monkeypatch.setattr(host, "CPU", tmp_path / "cpu")
        monkeypatch.setattr(host, "NODE", tmp_path / "node")

    return make


def places(num_workers: int, bind: object = "auto") -> list[Place]:
    return [place_of(worker, num_workers, bind) for worker in range(num_workers)]


def test_lists_of_cpus_are_read_as_linux_writes_them() -> None:
    assert host.cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert host.cpu_list("\n") == []
    with pytest.raises(ValueError, match="invalid literal"):
        host.cpu_list("all")


def test_each_worker_gets_the_cores_of_its_node(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15")
    assert places(2) == [Place((0, 1, 2, 3), 0), Place((4, 5, 6, 7), 1)]


def test_workers_that_share_a_node_share_its_cores(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15")
    assert places(4) == [Place((0, 1, 2, 3), 0)] * 2 + [Place((4, 5, 6, 7), 1)] * 2


def test_worker_with_several_nodes_prefers_none_of_them(machine: Machine) -> None:
    machine("0,4", "1,5", "2,6", "3,7")
    assert places(2) == [Place((0, 1), None), Place((2, 3), None)]


def test_nobody_is_bound_where_there_is_nothing_to_gain(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15")
    assert places(1) == [ANYWHERE]
    assert places(2, "none") == [ANYWHERE] * 2


def test_nobody_gets_fewer_cores_for_being_bound(machine: Machine) -> None:
    machine("0-5,12-17", "6-11,18-23")
    assert places(3) == [ANYWHERE] * 3, "two would share six cores, of twelve for three"
    assert all(place.cpus for place in places(4))


def test_one_node_binds_nobody(machine: Machine) -> None:
    machine("0-7")
    assert places(2) == [ANYWHERE] * 2


def test_cpus_that_may_not_be_used_do_not_count(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15", allowed="2-5")
    assert places(2) == [Place((2, 3), 0), Place((4, 5), 1)]


def test_uneven_rest_of_two_nodes_binds_nobody(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15", allowed="1-4")
    assert places(2) == [ANYWHERE] * 2


def test_nodes_without_usable_cpus_are_not_given_out(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15", "", allowed="0-3")
    assert places(2) == [ANYWHERE] * 2


def test_quota_leaves_fewer_threads_and_the_same_cores(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15", quota=4)
    assert places(2) == [Place((0, 1, 2, 3), 0), Place((4, 5, 6, 7), 1)]
    assert host.thread_count(None, num_workers=2) == 2 or os.environ.get("OMP_NUM_THREADS")


def test_named_cpus_are_given_out_in_turn_with_the_node_they_lie_on(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15")
    assert places(3, parse("0-1,8|6")) == [Place((0, 1, 8), 0), Place((6,), 1), Place((0, 1, 8), 0)]
    assert places(1, parse("3,4")) == [Place((3, 4), None)]
    assert [parse(word) for word in ("auto", "none")] == ["auto", "none"]


@pytest.mark.parametrize(
    ("text", "word"), [("", "lists of CPUs"), ("0|", "lists of CPUs"), ("fast", "invalid"), ("0,16,99", "CPU 16, 99")]
)
def test_lists_that_cannot_be_taken_are_refused_with_the_reason(machine: Machine, text: str, word: str) -> None:
    machine("0-7", "8-15")
    with pytest.raises(ValueError, match=word):
        parse(text)


def test_option_reaches_the_device_and_gives_the_threads(machine: Machine) -> None:
    machine("0-3,8-11", "4-7,12-15")
    option = octavo_cpu.platform_info().options["threads_bind"]
    caps = octavo_cpu.platform_caps({"threads_bind": option.type("0-2|4-5")})
    two = make_config(tensor_parallel_size=2)
    device = octavo_cpu.make_device(0, two, caps)
    assert (device.place, device.num_threads, device.describe().numa) == (Place((0, 1, 2), 0), 3, 0)
    assert octavo_cpu.make_device(0, make_config(tensor_parallel_size=2, threads=1), caps).num_threads == 1
    assert octavo_cpu.make_device(0, make_config(), octavo_cpu.platform_caps({})).place == ANYWHERE


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system confines no threads")
can_prefer = placement.policy() == placement.DEFAULT_POLICY and not placement.set_policy(placement.DEFAULT_POLICY)
needs_policy = pytest.mark.skipif(not can_prefer, reason="this system lets nobody choose where memory comes from")


@needs_affinity
def test_what_a_confined_thread_starts_stays_with_it_until_it_leaves() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    seen: list[set[int]] = []
    placement.take(Place((one,)))
    try:
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        placement.take(Place((one,)))
    finally:
        placement.leave()
    assert seen == [{one}]
    assert os.sched_getaffinity(0) == before
    placement.leave()
    assert os.sched_getaffinity(0) == before


@needs_affinity
@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")
def test_threads_of_the_kernels_run_where_their_worker_does() -> None:
    code = (
        "import os, torch; from octavo_cpu import native; from octavo.plugin import LinearSpec\n"
        "from octavo_cpu.device import CpuDevice; from octavo_cpu.linear_native import matmul, pack\n"
        "from octavo_cpu.placement import Place\n"
        "s = LinearSpec(in_features=512, out_features=512, act_dtype='float32', out_dtype='float32')\n"
        "CpuDevice(num_threads=3).activate(); m = matmul(s, 'float32', pack(torch.ones(512, 512), 'float32', s))\n"
        "one = min(os.sched_getaffinity(0)); before = set(os.listdir('/proc/self/task'))\n"
        "CpuDevice(num_threads=3, place=Place((one,))).activate(); m(torch.ones(4, 512), None)\n"
        "new = set(os.listdir('/proc/self/task')) - before; assert len(new) == 2, new\n"
        "assert all(os.sched_getaffinity(int(t)) == {one} for t in new)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_affinity
@needs_policy
def test_new_memory_comes_from_the_node_unless_the_user_chose_before() -> None:
    node, cpus = next(iter(host.nodes().items()))
    place = Place(tuple(cpus), node)
    placement.take(place)
    assert placement.policy() == placement.PREFERRED_POLICY
    placement.leave()
    assert placement.policy() == placement.DEFAULT_POLICY
    interleave = 3
    try:
        assert placement.set_policy(interleave, node) == 0
        placement.take(place)
        assert placement.policy() == interleave
        placement.leave()
        assert placement.policy() == interleave
    finally:
        placement.set_policy(placement.DEFAULT_POLICY)


@needs_affinity
@needs_policy
def test_node_that_is_not_there_is_told_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.INFO, logger="octavo_cpu.placement"):
        for node in (1000, 5000):
            placement.take(Place(tuple(before), node))
            placement.leave()
    assert caplog.text.count("memory is not bound to node") == 2
    assert placement.policy() == placement.DEFAULT_POLICY


@needs_affinity
def test_ranks_of_a_second_engine_do_not_begin_where_the_first_was_put() -> None:
    before = os.sched_getaffinity(0)
    CpuDevice(num_threads=1, place=Place((min(before),))).activate()
    try:
        octavo_cpu.platform_launch()
        assert os.sched_getaffinity(0) == before
    finally:
        placement.leave()
