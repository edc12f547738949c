"""The products of few rows compile for chips that are not here, use their matrix units, and stream the weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels need triton")

COMPILER = Path(__file__).with_name("compile_products.py")
KIB = 1024
SHARED_MEMORY = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
MATRIX_UNIT = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(SHARED_MEMORY))
def test_products_compile_for(target: str, tmp_path: Path) -> None:
    # A cache of its own, so that a kernel built earlier cannot stand in for one that no longer compiles.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(COMPILER), target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert len(kernels) == (17 if target == "sm_90" else 11)
    assert max(kernel["shared"] for kernel in kernels.values()) <= SHARED_MEMORY[target]
    for rows in (16, 64, 128):
        for gate in (None, "silu"):
            marks = kernels[f"skinny {rows} {gate}"]["marks"]
            assert MATRIX_UNIT[target] in marks, "tiles of 64 rows go to the large matrix unit"
            assert target == "gfx942" or "cp.async" in marks, "tiles are on their way while others are multiplied"
            if target == "sm_90":
                assert {"wgmma", "cp.async"} <= set(kernels[f"skinny fp8 {rows} {gate}"]["marks"])
