"""Every launch of the op kernels compiles for the chips that users have, none of which is needed here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels need triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_nvidia_and_amd_chips(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_ops_ahead.py")
    # A fresh process: this one interprets its kernels. A fresh cache: a compiled kernel must not hide a broken one.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
