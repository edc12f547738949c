"""The compiled library as a file: how it is built, found, switched off, and what its header and Python say alike."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from octavo_cpu import attention_native, communicator, linear_native, native, ops_native, sampling_native, tape
from octavo_cpu.kernels import build


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


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_library_is_compiled_again_after_a_change_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, source = tmp_path / "library.so", tmp_path / "one.cpp"
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "LIBRARY", library)
    monkeypatch.setattr(build, "RECIPE", tmp_path / "recipe.txt")
    monkeypatch.setattr(build, "FAILURE", tmp_path / "why.txt")

    def compiles() -> bool:
        library.write_bytes(b"as it was")
        assert build.build_or_say_why()
        return library.read_bytes() != b"as it was"

    source.write_text("int one() { return 1; }")
    assert compiles()
    assert not compiles()
    source.write_text("int one() { return 2; }")
    assert compiles()
    monkeypatch.setenv("OCTAVO_CPU_CXXFLAGS", "-DSOMETHING")
    assert compiles()
    library.unlink()
    assert build.build_or_say_why()
    assert library.exists()
    source.write_text("no C++")
    assert not build.build_or_say_why()
    assert not library.exists()
    source.write_text("int one() { return 2; }")
    assert compiles(), "what was made before the failure is gone"


MIRRORS = (attention_native, communicator, linear_native, ops_native, sampling_native, tape)
"""Modules with twins of the structures of api.h: classes whose docstring names theirs."""


def twins() -> dict[str, type[ctypes.Structure]]:
    """Python's structures by the names of api.h's."""
    found = (value for module in MIRRORS for value in vars(module).values() if isinstance(value, type))
    structures = {c for c in found if issubclass(c, ctypes.Structure)}
    return {(c.__doc__ or "").split("`")[1].removeprefix("octavo::"): c for c in structures}


def claims(name: str, twin: type[ctypes.Structure]) -> list[str]:
    """What must hold in C++ for a structure to be what Python takes it for."""
    out = [f"sizeof(octavo::{name}) == {ctypes.sizeof(twin)}"]
    for field, kind, *_ in twin._fields_:
        trait = {ctypes.c_void_p: "pointer", ctypes.c_float: "floating_point"}.get(
            kind, "class" if issubclass(kind, ctypes.Structure) else "integral"
        )
        here = f"octavo::{name}, {field}"
        out.append(f"offsetof({here}) == {getattr(twin, field).offset}")
        out.append(f"sizeof(octavo::{name}::{field}) == {ctypes.sizeof(kind)}")
        out.append(f"std::is_{trait}_v<decltype(octavo::{name}::{field})>")
    return out


def numbered(names: Mapping[str, int], prefix: str = "") -> list[str]:
    return [f"octavo::{prefix}{name.upper()} == {number}" for name, number in names.items()]


def test_structures_and_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    """Names, places, sizes and kinds of all fields, as a compiler sees them."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    short = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "int8": "I8", "float8_e4m3fn": "E4M3"}
    kinds = {short.get(kind, kind): i for i, kind in enumerate(linear_native.KINDS)}
    dtypes = {short[str(dtype).removeprefix("torch.")]: i for dtype, i in ops_native.DTYPES.items()}
    checked = [claim for name, twin in twins().items() for claim in claims(name, twin)]
    checked += [f"OCTAVO_ABI == {native.ABI}", f"octavo::NUM_KINDS == {len(kinds)}"]
    checked += numbered(kinds) + numbered(dtypes, "AS_")
    checked += numbered({gate or "no_gate": i for i, gate in enumerate(native.GATES)})
    checked += numbered({"no_norm": ops_native.NORMS["none"], "norm_head": ops_native.NORMS["head"]})
    checked += numbered({"norm_row": ops_native.NORMS["row"]})
    source = tmp_path / "claims.cpp"
    lines = [f"static_assert({claim});" for claim in checked]
    source.write_text("\n".join(["#include <cstddef>", "#include <type_traits>", '#include "api.h"', *lines, ""]))
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{build.HERE}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_list_of_arguments_has_a_twin() -> None:
    named = re.findall(r"^struct (\w+Args|KVStrides|Linear) {", (build.HERE / "api.h").read_text(), re.MULTILINE)
    assert set(named) == set(twins())


def test_other_lists_of_dtypes_begin_like_the_one_that_is_checked() -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in ops_native.DTYPES]
    assert list(ops_native.DTYPES.values()) == list(range(len(names)))
    for shorter in (native.DTYPES, linear_native.DTYPES):
        assert list(shorter) == names[: len(shorter)]


@pytest.mark.skipif(bool(native.why_not()), reason="there is no library")
def test_weights_lie_apart_and_aligned_in_shared_memory() -> None:
    memory = linear_native.WeightMemory()
    pieces = [memory.take(size) for size in (1, 64, 1000, 40 << 20, 30 << 20, 50 << 20)]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert [piece.numel() for piece in pieces] == [1, 64, 1000, 40 << 20, 30 << 20, 50 << 20]
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
