"""The attention kernels compile for GPUs that are not here, use their matrix units and fit into their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` makes an environment that has it")

COMPILER = Path(__file__).with_name("compile_attention.py")
KIB = 1024
SHARED_MEMORY = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
MATRIX_UNIT = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
"""What tiles of many rows use; those of sixteen rows use `mma.sync` wherever there is one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "variants"),
    [
        ("sm_80", ["plain", "all", "wide", "float32"]),
        ("sm_90", ["plain", "all", "wide", "float32", "narrow"]),
        ("sm_100", ["plain", "all", "narrow"]),
        ("gfx942", ["plain", "all", "wide"]),
    ],
)
def test_kernels_compile_for(target: str, variants: list[str], tmp_path: Path) -> None:
    # A cache of its own, so that a kernel built earlier cannot stand in for one that no longer compiles.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(COMPILER), target, *variants]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = ["deal_kernel", "decode_kernel", "prefill_kernel", "kv_write_kernel"]
    assert [line["kernel"] for line in lines] == kernels * len(variants)
    assert all(line["binary"] > 0 for line in lines)
    assert max(line["shared"] for line in lines) <= SHARED_MEMORY[target], lines
    decode, prefill = lines[1:3]
    assert {"mma.sync", "v_mfma"} & set(decode["matrix"])
    assert MATRIX_UNIT[target] in prefill["matrix"]
