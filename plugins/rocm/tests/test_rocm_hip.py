"""The HIP kernels: compiled for cards by clang and by hiprtc, and run on the host from the same source."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
from host_hip import HostHip, host_products

from octavo.triton.linear_plain import FEW_TOKENS_DTYPES
from octavo_rocm import hip, kernels, products
from octavo_rocm.hip import HipError, HipLibraries, compiled, library
from octavo_rocm.kernels import ROWS
from octavo_rocm.targets import TARGETS, Target

CLANG_KNOWS = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
"""gfx950 came with LLVM 20."""
HIPRTC_KNOWS = ("gfx90a",)
"""Of Debian 12's ROCm 5.2."""
HOST = torch.device("cpu")


@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weight_format", ROWS)
def test_kernels_agree_with_torch_on_the_host(weight_format: str, dtype: str, wave: int) -> None:
    built = host_products(weight_format, getattr(torch, dtype), wave)
    assert products.self_test(built, weight_format, getattr(torch, dtype), HOST) == ""


def test_unpacked_weights_are_cores_to_the_last_bit() -> None:
    for weight_format in ("Plain", "Q8_0", "Q4_0"):
        weight, groups, num_in, plain = products.sample(weight_format, torch.bfloat16)
        found = host_products(weight_format, torch.bfloat16).unpack(weight, groups, num_in, torch.bfloat16)
        assert torch.equal(found, plain), weight_format


def test_a_row_of_4_bit_codes_may_end_inside_a_tile() -> None:
    from octavo.triton.int4 import pack

    codes = torch.randint(0, 16, (5, 288), dtype=torch.uint8)
    scale, offset = torch.rand(5, 9).half().float(), torch.rand(5, 9).half().float()
    packed = pack(codes, scale, offset)
    plain = (codes.view(5, 9, 32) * scale[..., None] + offset[..., None]).flatten(1)
    built = host_products("Int4", torch.float16)
    x = torch.randn(3, 288).half()
    found = built.gemv(x, packed.words, packed.groups, None)
    assert products.relative(found, x.float() @ plain.t()) < 2e-3
    assert torch.equal(built.unpack(packed.words, packed.groups, 288, torch.float16), plain.half())


def test_rows_of_x_may_be_strided_and_few_outputs_are_enough() -> None:
    built = host_products("Plain", torch.float16)
    x = torch.randn(4, 48).half()[:, 8:40]
    weight = torch.randn(1, 32).half()
    assert products.takes(x)
    assert products.relative(built.gemv(x, weight, None, None), x.float() @ weight.float().t()) < 2e-3


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.zeros(4, 16).half(), True),
        (torch.zeros(5, 16).half(), False),
        (torch.zeros(0, 16).half(), False),
        (torch.zeros(2, 20).half(), False),  # rows begin at byte 40
        (torch.zeros(2, 32).half()[:, 4:20], False),
        (torch.zeros(16, 2).half().t(), False),
    ],
)
def test_only_few_aligned_rows_are_taken(x: torch.Tensor, taken: bool) -> None:
    assert products.takes(x) is taken


class Wrong(HostHip):
    """Leaves what it should write."""

    def launch(self, function: Any, grid: int, threads: int, arguments: Sequence[Any], stream: int) -> None:
        """Nothing is written."""


def test_a_wrong_kernel_fails_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)
    built = products.Products(Wrong(), dict.fromkeys(kernels.NAMES), "Q8_0", 64)
    assert "self-test" in products.self_test(built, "Q8_0", torch.float16, HOST)


def test_numbers_that_are_not_finite_stay_so() -> None:
    built = host_products("Plain", torch.bfloat16)
    weight = torch.tensor([[float("nan")] * 8, [float("inf")] * 8, [1e38] * 8]).bfloat16()
    x = torch.ones(1, 8).bfloat16()
    found = built.gemv(x, weight, None, None)[0]
    assert found[0].isnan()
    assert found[1] == float("inf")
    assert found[2] == float("inf"), "the sum is beyond bfloat16"


# -- compiled for cards --


@pytest.mark.parametrize("weight_format", ROWS)
@pytest.mark.parametrize("name", CLANG_KNOWS)
def test_clang_makes_a_code_object_for(name: str, weight_format: str, tmp_path: Path) -> None:
    clang = shutil.which("clang++-19")
    assert clang, "install clang-19 and lld-19"
    source, target = tmp_path / "kernels.hip", TARGETS[name]
    source.write_text(kernels.source())
    for dtype in FEW_TOKENS_DTYPES:
        built = tmp_path / f"{dtype}.hsaco"
        command = [clang, "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"]
        command += ["-Wall", "-Werror", *kernels.options(weight_format, dtype, target, name)]
        done = subprocess.run([*command, "-o", built, source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        code = built.read_bytes()
        assert code[:4] == b"\x7fELF"
        assert all(kernel.encode() in code for kernel in kernels.NAMES)


@pytest.fixture(scope="module")
def libraries() -> HipLibraries:
    return HipLibraries()  # fails without ROCm's libraries: apt-get install libamdhip64-dev


@pytest.mark.parametrize("name", HIPRTC_KNOWS)
def test_the_plugins_own_compiler_makes_a_code_object_and_keeps_it(
    libraries: HipLibraries, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = kernels.options("Q4_K", "bfloat16", TARGETS[name], name)
    code = compiled(libraries, kernels.source(), options)
    assert all(kernel.encode() in code for kernel in kernels.NAMES)
    [kept] = tmp_path.glob("octavo/hip-*.hsaco")
    assert kept.read_bytes() == code
    monkeypatch.setattr(HipLibraries, "compile", lambda *arguments: pytest.fail("it was kept"))
    assert compiled(libraries, kernels.source(), options) == code


def test_a_compiler_error_is_told(libraries: HipLibraries) -> None:
    with pytest.raises(HipError, match=r"(?s)gfx90a.*no_such_thing"):
        libraries.compile("int x = no_such_thing;", ["--offload-arch=gfx90a"])


def test_without_rocm_the_reason_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "COMPILER", ("libno-such-rocm.so",))
    with pytest.raises(HipError, match=r"hiprtcCompileProgram.*libno-such-rocm\.so"):
        HipLibraries()


def test_torchs_own_copy_is_taken_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    (tmp_path / "libamdhip64.so").touch()
    monkeypatch.setattr(hip, "torch_libraries", lambda: tmp_path)
    monkeypatch.setattr(hip.ctypes, "CDLL", lambda place: asked.append(place) or CDLL(None))
    library(hip.RUNTIME, "printf")
    assert asked == [str(tmp_path / "libamdhip64.so")]


def test_a_launch_passes_the_arguments_and_the_stream(libraries: HipLibraries, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no card: what is launched is seen by a stand-in for the runtime."""
    seen: list[Any] = []

    class Runtime:
        def hipModuleLaunchKernel(self, *arguments: Any) -> int:
            seen.append(arguments)
            return 0

    monkeypatch.setattr(libraries, "_runtime", Runtime())
    monkeypatch.setattr(products, "stream_of", lambda device: 77)
    built = products.Products(libraries, {name: name for name in kernels.NAMES}, "Plain", 64)
    built.gemv(torch.zeros(3, 64).half(), torch.zeros(100, 64).half(), None, None)
    [(function, *grid, shared, stream, pointers, extra)] = seen
    assert function == "gemv_3"
    assert grid == [13, 1, 1, 256, 1, 1]  # 2 rows for each of 4 waves
    assert (shared, stream.value, extra, len(pointers)) == (0, 77, None, 9)

    def refuse(*arguments: Any) -> int:
        return 98

    monkeypatch.setattr(libraries, "_runtime", type("Broken", (), {"hipModuleLaunchKernel": staticmethod(refuse)})())
    with pytest.raises(HipError, match="hipModuleLaunchKernel returned 98"):
        built.gemv(torch.zeros(3, 64).half(), torch.zeros(100, 64).half(), None, None)


def test_options_name_the_card_and_its_wave() -> None:
    target: Target = TARGETS["gfx1100"]
    options = kernels.options("Int4", "float16", target, "gfx1102")
    assert "--offload-arch=gfx1102" in options
    assert "-DWAVE=32" in options
    assert "-DBFLOAT16" not in options
