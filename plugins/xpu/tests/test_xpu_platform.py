"""The hooks: what is found without a GPU, from made-up sysfs trees, and what recording asks of torch."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import octavo_xpu
from octavo.plugin import BatchKey
from octavo_xpu import drm, graphs, simulated
from octavo_xpu.device import XpuDevice
from octavo_xpu.graphs import XpuGraphs
from octavo_xpu.kernels import build


def add_gpu(
    root: Path, number: int, *, pci: str, device: str, driver: str = "xe", gib: int = 0, tiles: int = 1
) -> None:
    """One render node as the kernel shows it. gib: of its largest PCI window. tiles: 0 where the kernel shows none."""
    real = root / "devices" / pci
    real.mkdir(parents=True)
    (real / "vendor").write_text("0x8086\n" if driver != "amdgpu" else "0x1002\n")
    (real / "device").write_text(f"{device}\n")
    (real / "resource").write_text(f"0x{1 << 40:x} 0x{(1 << 40) + (gib << 30) - 1:x} 0x0\n0x0 0x0 0x0\n" if gib else "")
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (real / "driver").symlink_to(root / "drivers" / driver)
    for tile in range(tiles):
        (real / f"tile{tile}" / "gt0" if driver == "xe" else real / "drm" / "card1" / "gt" / f"gt{tile}").mkdir(
            parents=True
        )
    node = root / "drm" / f"renderD{number}"
    node.mkdir(parents=True)
    (node / "device").symlink_to(real)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "drm").mkdir()
    monkeypatch.setattr(drm, "SYSFS", tmp_path / "drm")
    for name in (drm.VISIBLE, drm.HIERARCHY, drm.PCI_ORDER):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_without_a_gpu_the_platform_says_so(sysfs: Path) -> None:
    probe = octavo_xpu.platform_probe()
    assert not probe.available
    assert "no Intel GPU" in probe.reason


def test_gpus_are_those_of_intels_drivers_in_pci_order(sysfs: Path) -> None:
    add_gpu(sysfs, 128, pci="0000:9a:00.0", device="0xe20b", gib=16)
    add_gpu(sysfs, 129, pci="0000:03:00.0", device="0x0bd5", driver="i915", gib=64)
    add_gpu(sysfs, 130, pci="0000:01:00.0", device="0x744c", driver="amdgpu")
    add_gpu(sysfs, 131, pci="0000:02:00.0", device="0x56a0", driver="vfio-pci")
    add_gpu(sysfs, 132, pci="0000:ff:00.0", device="0x1234", driver="xe")
    found = drm.gpus()
    assert [(desc.index, desc.pci, desc.memory >> 30) for desc in found] == [
        (0, "0000:03:00.0", 64),
        (1, "0000:9a:00.0", 16),
        (2, "0000:ff:00.0", 0),
    ]
    assert [desc.name for desc in found] == ["Intel Data Center GPU Max", "Intel Arc B-series", "Intel GPU 0x1234"]


def test_a_driver_that_tells_its_memory_is_believed(sysfs: Path) -> None:
    add_gpu(sysfs, 128, pci="0000:03:00.0", device="0x56c0", gib=2)
    (sysfs / "devices" / "0000:03:00.0" / "lmem_total_bytes").write_text(f"{14 << 30}\n")
    assert drm.gpus()[0].memory == 14 << 30


def add_cards(root: Path, count: int, *, tiles: int = 1, driver: str = "xe") -> None:
    """Cards of one kind on buses 1, 2, ...: Arc B-series of 12 GiB, or of several tiles Data Center GPU Max of 128."""
    arc = tiles == 1
    for i in range(1, count + 1):
        facts = {"pci": f"0000:0{i}:00.0", "device": "0xe20b" if arc else "0x0bd5", "gib": 12 if arc else 128}
        add_gpu(root, 127 + i, **facts, tiles=tiles, driver=driver)


def buses() -> list[int]:
    """Of the devices that a process gets, with their numbers checked."""
    found = drm.gpus()
    assert [desc.index for desc in found] == list(range(len(found)))
    assert octavo_xpu.platform_caps().max_world_size == max(1, len(found))
    return [int(desc.pci.split(":")[1], 16) for desc in found]


@pytest.mark.parametrize(
    ("mask", "left"),
    [("1", [2]), ("0, 2", [1, 3]), ("2,0", [1, 3]), ("1.0,1.1", [2]), ("1.1", []), ("7", []), ("", [1, 2, 3])],
)
def test_the_affinity_mask_hides_gpus(sysfs: Path, monkeypatch: pytest.MonkeyPatch, mask: str, left: list[int]) -> None:
    add_cards(sysfs, 3)
    monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
    assert buses() == left
    assert octavo_xpu.platform_probe().reason.startswith("no Intel GPU") == (not left)


@pytest.mark.parametrize("driver", drm.DRIVERS)
@pytest.mark.parametrize(
    ("mode", "mask", "left"),
    [
        ("", "", [1, 1, 2, 2]),  # Data Center GPU Max is FLAT where nothing is said
        ("", "2,3", [2, 2]),
        ("FLAT", "3,0", [1, 2]),
        ("FLAT", "0.1,1", [1]),  # tiles are not devices of a card here
        ("FLAT", "4", []),
        ("COMBINED", "2", [2]),
        ("COMPOSITE", "", [1, 2]),
        ("COMPOSITE", "1", [2]),
        ("COMPOSITE", "0.0,0.1", [1]),
        ("COMPOSITE", "0.1,1", [1, 2]),
        ("COMPOSITE", "2,3", []),
        ("nonsense", "2", [2]),
    ],
)
def test_tiles_are_devices_as_level_zero_has_them(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch, driver: str, mode: str, mask: str, left: list[int]
) -> None:
    add_cards(sysfs, 2, tiles=2, driver=driver)
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", mode)
    monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
    assert buses() == left


def test_the_memory_is_that_of_the_tiles_of_a_device(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_cards(sysfs, 2, tiles=2)
    assert [desc.memory >> 30 for desc in drm.gpus()] == [64, 64, 64, 64]
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0.1,1")
    assert [desc.memory >> 30 for desc in drm.gpus()] == [64, 128]


def test_a_mask_hides_nothing_where_tiles_are_not_known(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_cards(sysfs, 2, tiles=0)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "2,3")
    assert buses() == [1, 2]


def test_integrated_gpus_are_left_out_where_there_is_a_discrete_one(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(sysfs, 200, pci="0000:00:02.0", device="0x7d55", driver="i915")
    assert buses() == [0]
    add_cards(sysfs, 2)
    assert buses() == [1, 2]
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1,2")  # Level Zero counts discrete ones first
    assert buses() == [2]
    monkeypatch.setenv("ZE_AFFINITY_MASK", "2")
    assert buses() == [0]
    monkeypatch.setenv("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1")
    assert buses() == [2]


def test_a_discrete_gpu_of_a_virtual_machine_may_be_where_integrated_ones_are(sysfs: Path) -> None:
    add_gpu(sysfs, 128, pci="0000:00:02.0", device="0xe20b", gib=12)
    add_gpu(sysfs, 129, pci="0000:00:05.0", device="0xe20b", gib=12)
    assert buses() == [0, 0]


def test_missing_software_is_named_one_after_the_other(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(sysfs, 128, pci="0000:03:00.0", device="0xe20b", gib=12)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert "libze_loader" in octavo_xpu.platform_probe().reason
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(drm, "version", lambda name: "2.13.0+cpu")
    assert "not an XPU build" in octavo_xpu.platform_probe().reason
    monkeypatch.setattr(drm, "version", lambda name: "2.13.0+xpu")
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(build, "version", lambda name: "2026.0.0")
    probe = octavo_xpu.platform_probe()
    assert probe.available
    assert probe.score == 70
    assert probe.devices[0].name == "Intel Arc B-series"


def test_the_hooks_import_no_torch() -> None:
    code = "import sys, octavo_xpu, octavo_xpu.drm; octavo_xpu.platform_probe(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compute_units_are_xe_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's build for GPUs describes an Arc A770: it has no multi_processor_count, and counts vector engines as
    compute units."""
    facts = {"name": "Intel(R) Arc(TM) A770 Graphics", "total_memory": 16 << 30, "uuid": "86-80"}
    units = {"max_compute_units": 512, "gpu_eu_count": 512, "gpu_subslice_count": 32}
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: SimpleNamespace(**facts, **units))
    described = XpuDevice(1).describe()
    assert (described.name, described.index, described.memory) == (facts["name"], 1, 16 << 30)
    assert described.compute_units == 32


def test_what_is_claimed_for_gpus_is_what_the_simulated_platform_is_checked_for() -> None:
    claimed, checked = octavo_xpu.platform_caps(), simulated.platform_caps()
    assert claimed.features == checked.features
    assert claimed.collectives == checked.collectives
    assert claimed.dtypes == checked.dtypes


class FakeXpu:
    """torch.xpu as far as recording needs it; notes the order of calls."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: object) -> Any:
        return SimpleNamespace(
            wait_stream=lambda other: self.log.append("side waits for current"),
            synchronize=lambda: self.log.append("side is done"),
        )

    def current_stream(self, device: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("current waits for side"))

    def graph_pool_handle(self) -> str:
        return "pool"

    def stream(self, stream: object) -> Any:
        fake = self

        class Use:
            def __enter__(self) -> None:
                fake.log.append("on side")

            def __exit__(self, *error: object) -> None:
                fake.log.append("off side")

        return Use()

    def XPUGraph(self) -> Any:
        return SimpleNamespace(
            capture_begin=lambda pool: self.log.append(f"begin {pool}"),
            capture_end=lambda: self.log.append("end"),
            replay=lambda: self.log.append("replay"),
            reset=lambda: self.log.append("reset"),
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeXpu:
    xpu = FakeXpu()
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(xpu=xpu, __version__="2.13.0"))
    return xpu


KEY = BatchKey(num_tokens=8, num_seqs=8, max_q_len=1)


def test_a_step_runs_once_and_is_then_recorded_on_the_side_stream(fake: FakeXpu) -> None:
    runner = XpuGraphs(torch.device("cpu"))
    handle = runner.prepare(KEY, lambda: fake.log.append("step") or "outputs")
    assert fake.log == [
        "side waits for current",
        "on side",
        "step",
        "side is done",
        "begin pool",
        "step",
        "end",
        "off side",
        "current waits for side",
    ]
    fake.log.clear()
    assert runner.run(handle) == "outputs"
    runner.close()
    runner.close()
    assert fake.log == ["replay", "reset"]


def test_a_step_that_cannot_be_recorded_is_named(fake: FakeXpu) -> None:
    calls = iter([None, RuntimeError("not supported by graphs")])

    def step() -> None:
        if (problem := next(calls)) is not None:
            raise problem

    with pytest.raises(RuntimeError, match=r"8 tokens in 8 sequences .*not supported.*--enforce-eager"):
        XpuGraphs(torch.device("cpu")).prepare(KEY, step)
    assert fake.log[-2:] == ["end", "off side"]


def test_this_torch_has_what_recording_and_launching_call() -> None:
    """Names only: the build for GPUs has them too, and nothing here runs."""
    assert graphs.why_not() == ""
    for name in ("Stream", "stream", "current_stream", "graph_pool_handle", "mem_get_info", "get_device_properties"):
        assert hasattr(torch.xpu, name)
    for name in ("capture_begin", "capture_end", "replay", "reset"):
        assert hasattr(torch.xpu.XPUGraph, name)
    assert octavo_xpu.platform_caps().dist_backend in torch.distributed.Backend.backend_list
