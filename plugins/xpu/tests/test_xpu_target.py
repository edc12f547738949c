"""The kernels as machine code for Intel GPUs, by Intel's offline compiler: nothing runs, but what no GPU can do shows.

`ocloc` comes with Debian's intel-opencl-icd; without it the tests fail. It takes the very SPIR-V that the run-time
compiler makes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_xpu.device import SyclDevice
from octavo_xpu.native import XMX

DEVICES = ("dg2", "pvc")
"""Arc A-series and Data Center GPU Max: what the compiler of Debian 12 knows."""

MATRIX_DEVICE = "pvc"
"""Matrix units of Arc A-series work in sub-groups of 8, which these kernels do not use."""

MAKE = "import sys; from octavo_xpu import simulated; simulated.device().runtime.module(*{!r}, **{!r})[{!r}]"

ATTENTION = {"HEAD_SIZE": 128, "GROUP": 4, "TOKENS": 2, "SUB_GROUPS": 4, "DECODE": 0}

MODULES = {
    "small": ("small.cpp", {"NUMBER": "BFLOAT16"}, ("rms_norm", "add_rms_norm", "act_and_mul", "qkv_norm_rope")),
    "linear": ("linear.cpp", {"NUMBER": "FLOAT16"}, ("int4", "int8", "unpack_int4", "unpack_int8")),
    "prompts": ("attention.cpp", {"NUMBER": "BFLOAT16", **ATTENTION}, ("attention", "merge")),
    "decoding": (
        "attention.cpp",
        {"NUMBER": "FLOAT16", **ATTENTION, "HEAD_SIZE": 256, "GROUP": 8, "TOKENS": 1, "DECODE": 1},
        ("attention", "merge"),
    ),
}


MATRIX_MODULES = {
    "linear": ("linear_matrix.cpp", {"NUMBER": "BFLOAT16"}, ("int4", "int8", "int8_int8")),
    "prompts": (
        "attention_matrix.cpp",
        {"NUMBER": "FLOAT16", "HEAD_SIZE": 64, "GROUP": 4, "TOKENS": 8, "SUB_GROUPS": 4},
        ("attention",),
    ),
}
"""With the functions of matrix units, which only a GPU's compiler has."""


def images_of(folder: Path, source: str, defines: dict[str, object], kernel: str, *, runs: bool) -> list[Path]:
    """The SPIR-V of a source, in as many modules as it takes. runs: the CPU device can build it too."""
    environment = {**os.environ, "SYCL_DUMP_IMAGES": "1", "SYCL_CACHE_PERSISTENT": "0"}
    code = MAKE.format((source,), defines, kernel)
    subprocess.run([sys.executable, "-c", code], check=runs, cwd=folder, env=environment, capture_output=True)
    return sorted(folder.glob("*.spv"))


def machine_code(images: list[Path], target: str, kernels: tuple[str, ...], *, spills: bool = False) -> bytes:
    """What Intel's offline compiler makes of the kernels, without a warning. spills: but of too few registers."""
    ocloc = shutil.which("ocloc")
    assert ocloc, "Intel's offline compiler is missing: apt install intel-opencl-icd"
    code = b""
    for image in images:
        name = f"{image.stem}-{target}"
        command = [ocloc, "compile", "-spirv_input", "-file", image.name, "-device", target]
        command += ["-output", name, "-exclude_ir"]
        done = subprocess.run(command, cwd=image.parent, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert all(spills and "spilled" in line for line in said.splitlines() if "warning" in line.lower()), said
        [binary] = image.parent.glob(f"{name}*.bin")
        code += binary.read_bytes()
    for kernel in kernels:
        assert f"__sycl_kernel_{kernel}\0".encode() in code, kernel
    return code


@pytest.mark.parametrize("name", MODULES)
def test_a_gpu_can_run_what_the_run_time_compiler_makes(device: SyclDevice, tmp_path: Path, name: str) -> None:
    source, defines, kernels = MODULES[name]
    images = images_of(tmp_path, source, defines, kernels[0], runs=True)
    for target in DEVICES:
        machine_code(images, target, kernels)


@pytest.mark.parametrize("name", MATRIX_MODULES)
def test_matrix_units_are_used_by_functions_that_a_gpus_compiler_knows(
    device: SyclDevice, tmp_path: Path, name: str
) -> None:
    """It puts an instruction in their place; the name of a function that it does not know stays, for a linker."""
    source, defines, kernels = MATRIX_MODULES[name]
    images = images_of(tmp_path, source, defines | {"MATRIX": XMX}, kernels[0], runs=False)
    assert any(b"matrix_mad_k16" in image.read_bytes() for image in images)
    assert b"matrix_mad" not in machine_code(images, MATRIX_DEVICE, kernels, spills=True)
    for image in images:
        image.write_bytes(image.read_bytes().replace(b"matrix_mad_k", b"matrix_sad_k"))
    assert b"matrix_sad" in machine_code(images, MATRIX_DEVICE, kernels, spills=True)
