"""What the hooks say, on machines with chips and without: files only, no device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import octavo_tpu
from octavo.config import apply_patches, make_config
from octavo.features import negotiate
from octavo.plugin import BatchLimits
from octavo_tpu import runtimes
from octavo_tpu.chips import find_chips

OPTIONS = {name: spec.default for name, spec in octavo_tpu.platform_info().options.items()}


def add_chip(
    root: Path, place: str, *, device: str = "0x006f", group: str | None = "7", vendor: str = "0x1ae0"
) -> None:
    folder = root / "sys/bus/pci/devices" / place
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "device").write_text(device + "\n")
    (root / "dev/vfio").mkdir(parents=True, exist_ok=True)
    if group is not None:
        (root / "groups" / group).mkdir(parents=True, exist_ok=True)
        (folder / "iommu_group").symlink_to(root / "groups" / group)
        (root / "dev/vfio" / group).touch()


def test_chips_behind_vfio_are_found_in_order(tmp_path: Path) -> None:
    add_chip(tmp_path, "0000:05:00.0", group="8")
    add_chip(tmp_path, "0000:04:00.0", group="7")
    chips = find_chips(tmp_path)
    assert [(chip.name, chip.index, chip.pci) for chip in chips] == [
        ("TPU v6e", 0, "0000:04:00.0"),
        ("TPU v6e", 1, "0000:05:00.0"),
    ]
    assert chips[0].memory == 32 << 30


def test_a_chip_that_is_handed_to_nobody_is_none(tmp_path: Path) -> None:
    add_chip(tmp_path, "0000:04:00.0", group=None)
    assert find_chips(tmp_path) == []
    (tmp_path / "dev/accel0").touch()  # the driver of older machines
    (tmp_path / "sys/bus/pci/devices/0000:04:00.0/iommu_group").symlink_to(tmp_path)
    assert len(find_chips(tmp_path)) == 1


def test_other_cards_and_unknown_devices_are_no_chips(tmp_path: Path) -> None:
    add_chip(tmp_path, "0000:04:00.0", vendor="0x10de")
    add_chip(tmp_path, "0000:05:00.0", device="0x0042")
    assert find_chips(tmp_path) == []
    assert find_chips(tmp_path / "nowhere") == []


def test_this_machine_has_no_chip_and_the_probe_says_so() -> None:
    if find_chips():
        pytest.skip("it has one")
    probe = octavo_tpu.platform_probe()
    assert not probe.available
    assert "no TPU chip" in probe.reason


def test_the_hooks_import_nothing_heavy() -> None:
    code = (
        f"import sys, octavo_tpu; octavo_tpu.platform_probe(); octavo_tpu.platform_caps({OPTIONS});"
        "print(sorted({'torch', 'torch_tpu', 'jax', 'libtpu'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_config_beyond_the_buckets_is_brought_within_them() -> None:
    caps = octavo_tpu.platform_caps(OPTIONS)
    config = make_config(max_num_seqs=1000, max_num_batched_tokens=9999)
    patched, log = apply_patches(
        make_config(), octavo_tpu.platform_configure(make_config(max_num_seqs=1000, max_num_batched_tokens=9999), caps)
    )
    assert patched.scheduler.max_num_seqs == caps.buckets.num_seqs[-1]
    assert patched.scheduler.max_num_batched_tokens == caps.buckets.num_tokens[-1]
    assert patched.cache.block_size == octavo_tpu.BLOCK_SIZE
    negotiate(patched, caps)
    kept, log = apply_patches(config, octavo_tpu.platform_configure(config, caps))
    assert kept.scheduler.max_num_seqs == 1000, "what a user set is refused by name, not changed"
    assert any("kept scheduler.max_num_seqs" in line for line in log)


def test_compiled_shapes_are_few_and_hold_every_step() -> None:
    from octavo.runner.buckets import Shapes
    from octavo_tpu.graphs import compiled_shapes

    limits = BatchLimits(max_num_tokens=2048, max_num_seqs=200, max_model_len=4096)
    keys = compiled_shapes(limits)
    assert len(keys) == 14
    shapes = Shapes.of(octavo_tpu.platform_caps(OPTIONS), limits, keys)
    assert sorted(shapes.at_start, key=str) == sorted(keys, key=str)
    for num_seqs in (1, 8, 9, 200):
        key, captured = shapes.choose(num_seqs, num_seqs, 4000, 1)
        assert captured
        assert key.max_q_len == 1
        for num_tokens in (num_seqs + 1, 2048):
            key, captured = shapes.choose(num_tokens, num_seqs, 4000, num_tokens - num_seqs + 1)
            assert captured
            assert key.max_q_len == 0


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda name: object() if name in names else None)


def test_auto_takes_the_runtime_that_is_installed_and_torch_tpu_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, chosen in (
        (("torch_tpu", "torch_xla"), "torch_tpu"),
        (("torch_tpu",), "torch_tpu"),
        (("torch_xla",), "torch_xla"),
    ):
        installed(monkeypatch, *names)
        assert octavo_tpu.platform_caps(OPTIONS).extras["runtime"] == chosen
        assert octavo_tpu.platform_caps({**OPTIONS, "runtime": "torch_xla"}).extras["runtime"] == "torch_xla"


def test_a_runtime_that_is_not_there_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "torch_tpu", "libtpu")
    with pytest.raises(ValueError, match=r"torch_xla is not installed: pip install .octavo-tpu\[torch-xla\]"):
        runtimes.runtime_choice("torch_xla")
    with pytest.raises(ValueError, match="must be auto, torch_tpu or torch_xla, not 'jax'"):
        runtimes.runtime_choice("jax")
    assert "jax is not installed: pip install" in runtimes.missing_software()
    installed(monkeypatch, "torch_xla", "libtpu")
    assert runtimes.missing_software() == ""


def test_only_torch_xla_divides_a_model_over_chips() -> None:
    caps = octavo_tpu.platform_caps({**OPTIONS, "runtime": "torch_tpu", "chips": 4})
    with pytest.raises(RuntimeError, match="chips=4: only --platform-opt runtime=torch_xla"):
        octavo_tpu.make_device(0, caps)
    with pytest.raises(ValueError, match="at least 1"):
        octavo_tpu.chip_count("0")


def test_steps_run_ahead_only_where_copies_to_the_host_do_not_wait() -> None:
    for runtime, ahead in (("torch_tpu", 1), ("torch_xla", 0)):
        caps = octavo_tpu.platform_caps({**OPTIONS, "runtime": runtime})
        patched, _ = apply_patches(make_config(), octavo_tpu.platform_configure(make_config(), caps))
        assert patched.scheduler.run_ahead == ahead
