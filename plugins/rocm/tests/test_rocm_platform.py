"""The hooks, and what the driver and the disk say of the machine, without a card."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import octavo_rocm
from octavo.config import apply_patches, make_config
from octavo.plugin import DeviceDesc
from octavo_rocm import software, topology
from octavo_rocm.device import RocmDevice
from octavo_rocm.targets import TARGETS, arch_of, target_of
from octavo_rocm.topology import Card, DriverError, cards

GIB = 1 << 30
MI300X = {
    "simd_count": 1216,
    "simd_per_cu": 4,
    "gfx_target_version": 90402,
    "domain": 0,
    "location_id": (0x1B << 8) | (2 << 3) | 1,
    "drm_render_minor": 128,
    "unique_id": 0x1234ABCD,
}


class Machine:
    """A tree of /dev and /sys as the driver lays it out: a CPU, and cards that are added."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._nodes = root / "sys/class/kfd/kfd/topology/nodes"
        (root / "dev/dri").mkdir(parents=True)
        (root / "dev/kfd").touch()
        self._write(0, {"simd_count": 0, "gfx_target_version": 0, "cpu_cores_count": 96}, 512 * GIB, 0)

    def add(self, memory: int = 192 * GIB, **changes: int) -> None:
        number = len(list(self._nodes.iterdir()))
        facts = MI300X | {"drm_render_minor": 127 + number, "unique_id": MI300X["unique_id"] + number} | changes
        self._write(number, facts, memory, 1)
        (self.root / f"dev/dri/renderD{facts['drm_render_minor']}").touch()

    def _write(self, number: int, facts: dict[str, int], memory: int, heap: int) -> None:
        bank = self._nodes / str(number) / "mem_banks/0"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {memory}\nflags 0\n")
        lines = [f"{name} {value}" for name, value in facts.items()]
        (self._nodes / str(number) / "properties").write_text("\n".join([*lines, "odd line of three", ""]))

    def cards(self, **environment: str) -> list[Card]:
        return cards(self.root, environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def card(arch: str = "gfx942", memory: int = 192 * GIB) -> Card:
    return Card(desc=DeviceDesc(name="AMD Instinct", memory=memory), arch=arch)


def show(monkeypatch: pytest.MonkeyPatch, *found: Card) -> None:
    monkeypatch.setattr(topology, "cards", lambda: list(found))


def test_importing_and_probing_load_no_torch() -> None:
    code = (
        "import sys, octavo_rocm; octavo_rocm.platform_info(); octavo_rocm.platform_probe(); "
        "octavo_rocm.platform_caps({}); sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_without_a_driver_the_probe_says_so_and_caps_still_answer() -> None:
    with pytest.raises(DriverError, match="no AMD driver"):
        cards(Path("/nonexistent"), {})
    caps = octavo_rocm.platform_caps({})
    assert (caps.graph, caps.dist_backend, caps.max_world_size) == ("capture", "nccl", 1)


def test_a_card_is_described_by_its_node(machine: Machine) -> None:
    machine.add()
    product = machine.root / "sys/class/drm/renderD128/device"
    product.mkdir(parents=True)
    (product / "product_name").write_text("AMD Instinct MI300X\n")
    assert machine.cards() == [
        Card(
            desc=DeviceDesc(
                name="AMD Instinct MI300X",
                memory=192 * GIB,
                compute_units=304,
                uuid="GPU-000000001234abce",
                pci="0000:1b:02.1",
            ),
            arch="gfx942",
        )
    ]


def test_cpus_and_cards_of_other_containers_are_left_out(machine: Machine) -> None:
    machine.add()
    machine.add()
    machine.add(gfx_target_version=110000)
    (machine.root / "dev/dri/renderD129").unlink()
    assert [(c.arch, c.desc.index) for c in machine.cards()] == [("gfx942", 0), ("gfx1100", 1)]


def test_no_right_to_the_driver_is_a_reason(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.os, "access", lambda path, mode: False)
    with pytest.raises(DriverError, match="group 'render'"):
        machine.cards()


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, [0, 1, 2]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000001234abcf"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-"}, []),
        ({"HIP_VISIBLE_DEVICES": "1,7,0"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_visible_devices_are_read_as_the_runtime_reads_them(
    machine: Machine, environment: dict[str, str], found: list[int]
) -> None:
    for _ in range(3):
        machine.add()
    seen = machine.cards(**environment)
    assert [c.desc.uuid for c in seen] == [f"GPU-{0x1234ABCE + i:016x}" for i in found]
    assert [c.desc.index for c in seen] == list(range(len(found)))


def test_cards_need_a_rocm_build_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    show(monkeypatch, card())
    monkeypatch.setattr(software, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert "not a ROCm build" in octavo_rocm.platform_probe().reason
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cuda.so").touch()
    assert "not a ROCm build" in octavo_rocm.platform_probe().reason, "another vendor's build is none"
    (tmp_path / "lib/libtorch_hip.so").touch()
    probe = octavo_rocm.platform_probe()
    assert (probe.available, probe.score, len(probe.devices)) == (True, 80, 1)
    monkeypatch.setattr(software, "find_spec", lambda name: None)
    assert octavo_rocm.platform_probe().reason == "torch is not installed"


def test_a_card_that_no_kernel_is_written_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, card(), card("gfx906"))
    assert "gfx906" in octavo_rocm.platform_probe().reason
    show(monkeypatch)
    assert "HIP_VISIBLE_DEVICES" in octavo_rocm.platform_probe().reason


def test_another_vendors_torch_never_becomes_a_device_of_this_platform() -> None:
    assert torch.version.hip is None, "this test is for other builds"
    with pytest.raises(RuntimeError, match="not a ROCm build"):
        RocmDevice(0)


@pytest.mark.parametrize(
    ("archs", "fp8"),
    [
        (("gfx90a",), set()),
        (("gfx942",), {"e4m3fnuz", "e5m2fnuz"}),
        (("gfx950", "gfx1200"), {"e4m3fn", "e5m2"}),
        (("gfx942", "gfx950"), set()),
        (("gfx1101",), set()),
    ],
)
def test_fp8_is_what_all_cards_multiply(monkeypatch: pytest.MonkeyPatch, archs: tuple[str, ...], fp8: set[str]) -> None:
    show(monkeypatch, *(card(arch) for arch in archs))
    caps = octavo_rocm.platform_caps({})
    assert caps.fp8 == fp8
    assert caps.max_world_size == len(archs)


def test_architectures_are_named_as_compilers_name_them() -> None:
    numbers = {90010: "gfx90a", 90402: "gfx942", 90500: "gfx950", 110000: "gfx1100", 120001: "gfx1201"}
    assert {arch_of(number) for number in numbers} == set(numbers.values()) == set(TARGETS)
    assert target_of("gfx942:sramecc+:xnack-") is TARGETS["gfx942"]
    assert target_of("gfx1200") is TARGETS["gfx1201"]
    assert target_of("gfx803") is None


def test_large_cards_run_more_rows_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, card())
    caps = octavo_rocm.platform_caps({})
    config, _ = apply_patches(make_config(), octavo_rocm.platform_configure(make_config(), caps))
    assert config.scheduler.max_num_seqs == 512
    mine = make_config(max_num_seqs=32)
    config, _ = apply_patches(mine, octavo_rocm.platform_configure(mine, caps))
    assert config.scheduler.max_num_seqs == 32
    show(monkeypatch, card(memory=24 * GIB))
    assert octavo_rocm.platform_configure(make_config(), caps) == ()


def test_the_option_is_parsed_and_reaches_the_kernels() -> None:
    option = octavo_rocm.platform_info().options["hip_kernels"]
    assert option.type("off") is False
    assert octavo_rocm.platform_caps({"hip_kernels": False}).extras["hip_kernels"] is False
    with pytest.raises(ValueError, match="on or off"):
        option.type("maybe")


def test_every_worker_sees_all_cards() -> None:
    launch = octavo_rocm.platform_launch(make_config(), octavo_rocm.platform_caps({}))
    assert launch.visible_env is None
