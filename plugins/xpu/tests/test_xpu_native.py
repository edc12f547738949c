"""Compiling and launching: what is kept on disk, what goes wrong by name, and which queue kernels go to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import octavo_xpu
from octavo.ops.bind import KernelTable
from octavo.plugin import LinearSpec
from octavo_xpu import native, simulated
from octavo_xpu.device import SyclDevice
from octavo_xpu.kernels import build
from octavo_xpu.kernels.build import NoLibraryError
from octavo_xpu.native import Module, Runtime


def test_the_simulator_is_intels_cpu_device(device: SyclDevice) -> None:
    words = device.runtime.describe()
    assert "driver" in words
    assert "OCL_ICD_VENDORS" not in os.environ, "what finding the driver needs is gone again"


def test_a_source_that_does_not_compile_says_where(device: SyclDevice) -> None:
    with pytest.raises(NoLibraryError, match=r"small\.cpp does not compile(?s:.*)NUMBER names the dtype"):
        Module(device.runtime, "small.cpp", (("NUMBER", "9"),))["rms_norm"]


def test_an_unknown_kernel_is_named(device: SyclDevice) -> None:
    with pytest.raises(NoLibraryError, match="no kernel softmax"):
        device.runtime.module("small.cpp", NUMBER="FLOAT32")["softmax"]


def test_a_launch_that_fails_names_the_kernel(device: SyclDevice) -> None:
    kernel = device.runtime.module("small.cpp", NUMBER="FLOAT32")["act_and_mul"]
    with pytest.raises(RuntimeError, match="kernel act_and_mul"):
        kernel((1, 1, 1), (1, 1, 1 << 30), torch.zeros(1, 2), torch.zeros(1, 1), 1, 2, 0)


def test_every_launch_asks_for_the_queue_of_now(device: SyclDevice) -> None:
    asked = []

    def queue() -> int:
        asked.append(len(asked))
        return simulated.cpu_queue()

    kernel = Runtime(queue, wait=True).module("small.cpp", NUMBER="FLOAT32")["act_and_mul"]
    asked.clear()
    x, out = torch.tensor([[0.0, 3.0]]), torch.ones(1, 1)
    for _ in range(3):
        kernel((1, 1, 1), (1, 1, 16), x, out, 1, 2, 0)
    assert len(asked) == 3
    assert out.item() == 0.0


def test_the_host_library_is_compiled_once_for_a_version(device: SyclDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.build()
    monkeypatch.setattr(build.subprocess, "run", lambda *args, **kwargs: pytest.fail("it was compiled again"))
    assert build.build() == first


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NoLibraryError, match=r"false .* failed"):
        build.build()
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(NoLibraryError, match="does not run"):
        build.build()
    assert list(tmp_path.rglob("*.so")) == []


def test_an_environment_without_the_runtime_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NoLibraryError, match="no SYCL headers"):
        build.build(tmp_path)
    monkeypatch.setattr(build, "RUNTIME", "no-such-package")
    with pytest.raises(NoLibraryError, match="no-such-package is not installed"):
        build.runtime_version()


@pytest.mark.parametrize(("found", "compiles"), [("2025.1.1", False), ("2025.3.2", False), ("2026.0.0", True)])
def test_kernels_are_left_out_where_the_runtime_cannot_compile_them(
    device: SyclDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    found: str,
    compiles: bool,
) -> None:
    monkeypatch.setattr(build, "version", lambda name: found)
    table = KernelTable()
    octavo_xpu.register_kernels(table, device)
    assert ("sycl" in [kernel.provider for kernel in table.providers("rms_norm")]) == compiles
    assert (f"intel-sycl-rt {found} cannot compile them; 2026.0, which torch 2.13's" in caplog.text) != compiles
    spec = LinearSpec(in_features=64, out_features=64, act_dtype="float32", out_dtype="float32")
    assert table.linear_kernel(spec, device).name == "onednn"


def test_device_code_is_kept_for_the_next_process(device: SyclDevice, tmp_path: Path) -> None:
    """The first process leaves what it compiled, the second what it made of that; the third adds nothing."""
    code = "from octavo_xpu import simulated; simulated.device().runtime.module('linear.cpp', NUMBER='FLOAT32')['int8']"
    environment = {**os.environ, "SYCL_CACHE_DIR": str(tmp_path), "SYCL_CACHE_PERSISTENT": "1"}
    kept = []
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        kept.append(sorted(path for path in tmp_path.rglob("*.bin")))
    assert kept[0]
    assert kept[1] == kept[2]


def test_numbers_keep_their_bits_as_arguments() -> None:
    assert native.float_bits(1.0) == 0x3F800000
    assert native.float_bits(-0.0) == 0x80000000
