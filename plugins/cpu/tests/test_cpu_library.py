"""The compiled library as a file: how it is built, found, switched off, and that it touches no memory but its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_cpu import native
from octavo_cpu.kernels import build
from octavo_cpu.linear_native import Layer


def reason_under(**environment: str) -> str:
    """What a fresh process says of the library."""
    command = [sys.executable, "-c", "from octavo_cpu import native; print(native.why_not())"]
    env = os.environ | environment
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def test_environment_switches_the_library_off_and_rejects_unknown_instruction_sets() -> None:
    assert "OCTAVO_CPU_NATIVE=0" in reason_under(OCTAVO_CPU_NATIVE="0")
    if not native.why_not():
        assert "must be one of generic" in reason_under(OCTAVO_CPU_ISA="mmx")
        assert not reason_under(OCTAVO_CPU_ISA="generic").strip()


def test_file_that_is_no_library_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "none.so").write_text("no library")
    with pytest.raises(build.NoLibraryError, match="do not load"):
        native.bind(str(tmp_path / "none.so"))


def test_build_without_a_compiler_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(build, "FAILURE", tmp_path / "why.txt")
    assert not build.build_or_say_why()
    assert "no-compiler does not run" in (tmp_path / "why.txt").read_text()
    assert not (tmp_path / "library.so").exists()


def test_structure_handed_to_the_library_is_as_large_as_its_twin() -> None:
    assert ctypes.sizeof(Layer) == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Every kind, odd shapes and threads, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = tmp_path / "sanitized"
    driver = Path(__file__).with_name("sanitized_products.cpp")
    flags = ["-std=c++17", "-O0", "-g1", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    objects = []
    for file in [*build.sources(), driver]:
        objects.append(str(tmp_path / f"{file.stem}.o"))
        command = ["g++", *flags, *build.OF_FILE.get(file.name, ()), f"-I{build.HERE}", "-c", str(file), "-o"]
        subprocess.run([*command, objects[-1]], check=True)
    subprocess.run(["g++", *flags, *objects, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "products" in done.stdout
