"""Every Triton kernel of the plugin, compiled for every target down to a code object; nothing runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_rocm.targets import TARGETS

SCRIPT = Path(__file__).with_name("compile_for_target.py")
MATRIX_KERNELS = ("decode_kernel", "prefill_kernel", "_gemv_kernel", "_int4_kernel")
UNIT = {"gfx90a": "v_mfma", "gfx942": "v_mfma", "gfx950": "v_mfma", "gfx1100": "v_wmma", "gfx1201": "v_wmma"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variants", ["few", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_all_kernels_compile_for(name: str, variants: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name, variants], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    target = TARGETS[name]
    expected = {
        *MATRIX_KERNELS,
        "deal_kernel",
        "kv_write_kernel",
        "_rope_kernel",
        "_qkv_norm_rope_kernel",
        "_act_and_mul_kernel",
        "_unpack_kernel",
    }
    expected |= {"_skinny_kernel", "_quantize_kernel"} if target.fp8 else set()
    assert expected <= found.keys()
    assert len(found) >= 18, sorted(found)
    too_much = {kernel: facts["shared"] for kernel, facts in found.items() if facts["shared"] > target.shared_memory}
    assert not too_much, f"more LDS than the {target.shared_memory} bytes of {name}"
    for kernel in MATRIX_KERNELS:
        assert any(text.startswith(UNIT[name]) for text in found[kernel]["matrix"]), f"{kernel}: no matrix unit"
    for kernel in ("_gemv_kernel", "_int4_kernel", *(("_skinny_kernel",) if target.fp8 else ())):
        assert found[kernel]["meetings"], f"{kernel}: no sums meet"
        assert not found[kernel]["early"], f"{kernel}: programs are counted in before memory has their sums"
        assert target.barrier_waits or found[kernel]["published"], f"{kernel}: waves do not wait for their stores"
    if target.fp8:
        # gfx950 has one instruction for all formats of eight bits and fewer.
        eight_bits = [text for text in found["_skinny_kernel"]["matrix"] if "fp8" in text or "f8f6f4" in text]
        assert eight_bits, "fp8 is not multiplied as fp8"
