"""What the tuning table asks for fits the cards it names, compiled without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = Path(__file__).parents[3] / "tests" / "unit" / "triton"
CODE = """
import sys
sys.path.insert(0, {folder!r})
import compile_attention
from triton.backends.compiler import GPUTarget
from octavo_cuda.overlap import overlap_for
from octavo_cuda.tuning import HOPPER
compile_attention.TARGETS["card"] = (GPUTarget("cuda", 90, 32), HOPPER)
compile_attention.main("card", {variant!r}, overlap_for((9, 0)))
"""
SHARED_MEMORY = 227 * 1024
"""Bytes that one program may take on Hopper."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "wide", "float32", "narrow"])
def test_attention_fits_hoppers_shared_memory(variant: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE.format(folder=str(COMPILER), variant=variant)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = [kernel["kernel"] for kernel in kernels]
    assert names == ["deal_kernel", "decode_kernel", "prefill_kernel", "kv_write_kernel"]
    assert all(kernel["shared"] <= SHARED_MEMORY for kernel in kernels), kernels
