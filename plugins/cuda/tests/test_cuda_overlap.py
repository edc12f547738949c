"""What kernels do before they wait for the one before them, as compiled for Hopper, where there is no card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from octavo.triton.overlap import IN_ORDER
from octavo_cuda.overlap import overlap_for

COMPILER = Path(__file__).parents[3] / "tests" / "unit" / "triton" / "compile_products.py"


def test_cards_before_hopper_start_kernels_in_order() -> None:
    assert overlap_for((8, 9)) is IN_ORDER
    assert overlap_for((9, 0)).early
    assert overlap_for((12, 0)).options == {"launch_pdl": True}


@pytest.mark.slow
def test_weights_are_asked_for_before_the_wait_and_results_of_others_read_behind_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(COMPILER), "sm_90", "octavo_cuda"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = {line["name"]: line["first"] for line in map(json.loads, done.stdout.splitlines())}
    for name, first in kernels.items():
        assert first["griddepcontrol.wait"] > 0, name
        if name.startswith(("lanes", "dot", "skinny 16", "skinny 64", "skinny 128")):
            assert 0 < first["prefetch.global.L2"] < first["griddepcontrol.wait"] < first["cp.async"], name
    # A weight of a norm may be read at once; an activation has nothing that is constant.
    assert kernels["act_and_mul"]["griddepcontrol.wait"] < kernels["act_and_mul"]["ld.global"]
    assert 0 < kernels["add_rms_norm"]["ld.global"] < kernels["add_rms_norm"]["griddepcontrol.wait"]
