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

DEVICES = ("dg2", "pvc")
"""Arc A-series and Data Center GPU Max: what the compiler of Debian 12 knows."""

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


@pytest.mark.parametrize("name", MODULES)
def test_a_gpu_can_run_what_the_run_time_compiler_makes(device: SyclDevice, tmp_path: Path, name: str) -> None:
    ocloc = shutil.which("ocloc")
    assert ocloc, "Intel's offline compiler is missing: apt install intel-opencl-icd"
    source, defines, kernels = MODULES[name]
    environment = {**os.environ, "SYCL_DUMP_IMAGES": "1", "SYCL_CACHE_PERSISTENT": "0"}
    code = MAKE.format((source,), defines, kernels[0])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
    [image] = tmp_path.glob("*.spv")
    for target in DEVICES:
        command = [ocloc, "compile", "-spirv_input", "-file", image.name, "-device", target]
        command += ["-output", target, "-exclude_ir"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout
        [binary] = tmp_path.glob(f"{target}*.bin")
        code_of_target = binary.read_bytes()
        for kernel in kernels:
            assert f"__sycl_kernel_{kernel}\0".encode() in code_of_target, kernel
