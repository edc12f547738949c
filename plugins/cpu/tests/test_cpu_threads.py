"""The pool of threads behind the compiled kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo_cpu.kernels import build


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_every_piece_is_worked_on_once_and_threads_do_not_race(tmp_path: Path, sanitizers: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = tmp_path / "stress"
    driver = Path(__file__).with_name("threads_stress.cpp")
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    sources = [str(driver), str(build.HERE / "threads.cpp")]
    subprocess.run(["g++", *flags, f"-I{build.HERE}", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "good" in done.stdout
