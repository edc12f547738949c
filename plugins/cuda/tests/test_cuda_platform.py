"""The hooks, and what the driver and the disk say of the machine, without a card."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import octavo_cuda
from octavo.config import apply_patches, make_config
from octavo.plugin import DeviceDesc
from octavo_cuda import nvml, software
from octavo_cuda.nvml import Card, NvmlError, Pci, cards, visible

GIB = 1 << 30


def card(index: int, *, capability: tuple[int, int] = (9, 0), memory: int = 141 * GIB) -> Card:
    desc = DeviceDesc(name="NVIDIA H200", index=index, memory=memory, uuid=f"GPU-{index}a{index}b")
    return Card(desc=desc, capability=capability)


def show(monkeypatch: pytest.MonkeyPatch, *found: Card) -> None:
    monkeypatch.setattr(nvml, "cards", lambda: list(found))


def test_importing_and_probing_load_no_torch() -> None:
    code = (
        "import sys, octavo_cuda; octavo_cuda.platform_info(); octavo_cuda.platform_probe(); "
        "octavo_cuda.platform_caps({}); sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_without_a_driver_the_probe_says_so_and_caps_still_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARIES", ("libno-such-driver.so",))
    probe = octavo_cuda.platform_probe()
    assert not probe.available
    assert "no NVIDIA driver" in probe.reason
    caps = octavo_cuda.platform_caps({})
    assert (caps.graph, caps.dist_backend, caps.max_world_size) == ("capture", "nccl", 1)
    assert octavo_cuda.platform_configure(make_config(), caps) == ()


def test_cards_need_a_cuda_build_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    show(monkeypatch, card(0), card(1))
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(software, "find_spec", lambda name: spec)
    assert "not a CUDA build" in octavo_cuda.platform_probe().reason
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cuda.so").touch()
    probe = octavo_cuda.platform_probe()
    assert (probe.available, probe.score, [d.index for d in probe.devices]) == (True, 80, [0, 1])
    monkeypatch.setattr(software, "find_spec", lambda name: None)
    assert octavo_cuda.platform_probe().reason == "torch is not installed"


def test_a_card_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, card(0), card(1, capability=(7, 0)))
    assert "compute capability 7.0; needed: 7.5" in octavo_cuda.platform_probe().reason


def test_no_visible_card_is_not_an_available_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch)
    assert "CUDA_VISIBLE_DEVICES" in octavo_cuda.platform_probe().reason


@pytest.mark.parametrize(
    ("capability", "dtypes", "kv_dtypes"),
    [
        ((7, 5), ("float16", "float32"), ("auto",)),
        ((8, 0), ("bfloat16", "float16", "float32"), ("auto",)),
        ((8, 9), ("bfloat16", "float16", "float32"), ("auto", "float8_e4m3fn")),
    ],
)
def test_number_formats_are_those_of_the_oldest_card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...]
) -> None:
    show(monkeypatch, card(0, capability=(9, 0)), card(1, capability=capability))
    caps = octavo_cuda.platform_caps({})
    assert (caps.dtypes, caps.default_dtype, caps.kv_dtypes) == (dtypes, dtypes[0], kv_dtypes)
    assert bool(caps.fp8) == ("float8_e4m3fn" in kv_dtypes)
    assert caps.max_world_size == 2


def test_large_cards_run_more_rows_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, card(0))
    caps = octavo_cuda.platform_caps({})
    config, _ = apply_patches(make_config(), octavo_cuda.platform_configure(make_config(), caps))
    assert (config.cache.memory_utilization, config.scheduler.max_num_seqs) == (0.92, 512)
    mine = make_config(max_num_seqs=32)
    config, _ = apply_patches(mine, octavo_cuda.platform_configure(mine, caps))
    assert config.scheduler.max_num_seqs == 32
    show(monkeypatch, card(0, memory=24 * GIB))
    assert octavo_cuda.platform_configure(make_config(), caps) == ()


@pytest.mark.parametrize(
    ("choice", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1, 7, 0", [1]),
        ("GPU-2a", [2]),
        ("GPU-", []),
        ("1,1", [1]),
        ("-1", []),
        ("", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(choice: str | None, indices: list[int]) -> None:
    found = [card(i) for i in range(3)]
    assert [c.desc.index for c in visible(found, choice)] == indices


class Driver:
    """NVML with two cards. fails: a function that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        def function(*arguments: object) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 999
            if hasattr(type(self), f"do_{name}"):
                getattr(self, f"do_{name}")(*arguments)
            return 0

        return function

    def do_nvmlDeviceGetCount_v2(self, count: object) -> None:
        count._obj.value = 2  # type: ignore[attr-defined]

    def do_nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: object) -> None:
        handle._obj.value = 100 + index.value  # type: ignore[attr-defined]

    def do_nvmlDeviceGetMemoryInfo(self, handle: object, memory: object) -> None:
        memory._obj.total = 141 * GIB  # type: ignore[attr-defined]

    def do_nvmlDeviceGetCudaComputeCapability(self, handle: object, major: object, minor: object) -> None:
        major._obj.value, minor._obj.value = 9, 0  # type: ignore[attr-defined]

    def do_nvmlDeviceGetPciInfo_v3(self, handle: object, pci: object) -> None:
        info: Pci = pci._obj  # type: ignore[attr-defined]
        info.bus_id = b"00000000:18:00.0"

    def do_nvmlDeviceGetName(self, handle: ctypes.c_void_p, buffer: ctypes.Array[ctypes.c_char], size: object) -> None:
        buffer.value = b"NVIDIA H200"

    def do_nvmlSystemGetDriverVersion(self, buffer: ctypes.Array[ctypes.c_char], size: object) -> None:
        buffer.value = b"580.65.06"

    def do_nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, buffer: ctypes.Array[ctypes.c_char], size: object) -> None:
        buffer.value = b"GPU-%d" % (handle.value or 0)


def test_cards_are_described_by_the_driver_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver()
    found = cards(driver)
    assert [c.desc.uuid for c in found] == ["GPU-100", "GPU-101"]
    assert found[1] == Card(
        desc=DeviceDesc(name="NVIDIA H200", index=1, memory=141 * GIB, uuid="GPU-101", pci="00000000:18:00.0"),
        capability=(9, 0),
    )
    assert (driver.calls[0], driver.calls[-1]) == ("nvmlInit_v2", "nvmlShutdown")


def test_the_driver_says_its_version() -> None:
    driver = Driver()
    assert nvml.driver_version(driver) == "580.65.06"
    assert (driver.calls[0], driver.calls[-1]) == ("nvmlInit_v2", "nvmlShutdown")
    with pytest.raises(NvmlError, match="nvmlSystemGetDriverVersion returned 999"):
        nvml.driver_version(Driver(fails="nvmlSystemGetDriverVersion"))


def test_a_driver_that_does_not_answer_is_reported_by_function_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NvmlError, match="nvmlInit_v2 returned 999"):
        cards(Driver(fails="nvmlInit_v2"))
    driver = Driver(fails="nvmlDeviceGetName")
    with pytest.raises(NvmlError, match="nvmlDeviceGetName returned 999"):
        cards(driver)
    assert driver.calls[-1] == "nvmlShutdown"


def test_a_card_without_memory_of_its_own_is_still_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [c.desc.memory for c in cards(Driver(fails="nvmlDeviceGetMemoryInfo"))] == [0, 0]


def test_slices_of_a_card_can_be_chosen_by_name() -> None:
    found = visible([card(0)], "MIG-17,MIG-18")
    assert [(c.desc.name, c.desc.uuid, c.desc.index) for c in found] == [
        ("slice of NVIDIA H200", "MIG-17", 0),
        ("slice of NVIDIA H200", "MIG-18", 1),
    ]
    assert visible([], "MIG-17") == []


def test_every_worker_sees_all_cards() -> None:
    launch = octavo_cuda.platform_launch(make_config(), octavo_cuda.platform_caps({}))
    assert launch.visible_env is None
