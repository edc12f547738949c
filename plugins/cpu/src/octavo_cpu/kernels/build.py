"""Compiles the C++ kernels into one shared library beside their sources; a C++17 compiler is all it takes.

    python -m octavo_cpu.kernels.build        again, after a change (the installation runs it by itself)

Knows nothing of Octavo or torch: the installation imports it from the bare source tree. The environment may name the
compiler (CXX) and further flags (OCTAVO_CPU_CXXFLAGS). A library of the same sources, compiler and flags stays: when
the tree is installed again, or packed into a wheel, nothing is compiled.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "liboctavo_cpu.so"
RECIPE = HERE / "build-recipe.txt"
"""What the library beside it was made of, as a hash."""
FAILURE = HERE / "build-failure.txt"
"""Why the last build gave no library; `native.py` tells it to who asks."""

FLAGS = ("-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
"""GCC 12's own AVX-512 header starts from registers of undefined content."""

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")))
AVX512_BF16 = (*AVX512, "-mavx512bf16")
OF_X86 = {
    "isa_avx2.cpp": AVX2,
    "isa_avx512.cpp": AVX512,
    "isa_avx512_bf16.cpp": AVX512_BF16,
    "isa_amx.cpp": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
OF_ARM = {"isa_neon.cpp": ("-march=armv8.2-a+dotprod",)}
OF_FILE = {**OF_X86, **OF_ARM}
"""Only these files may use more than the platform's base instructions."""


class NoLibraryError(Exception):
    """There is no library, and this is why."""


def compiler() -> str:
    """The C++ compiler: CXX, or the first one on the path."""
    if named := os.environ.get("CXX"):
        return named
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise NoLibraryError("no C++ compiler was found when octavo-cpu was installed")
    return found


def sources() -> list[Path]:
    """The files to compile on this machine's architecture."""
    machine = platform.machine().lower()
    ours = OF_X86 if machine in ("x86_64", "amd64") else OF_ARM if machine in ("aarch64", "arm64") else {}
    return [file for file in sorted(HERE.glob("*.cpp")) if file.name in ours or file.name not in OF_FILE]


def flags_of_the_user() -> list[str]:
    return shlex.split(os.environ.get("OCTAVO_CPU_CXXFLAGS", ""))


def build(target: Path = LIBRARY, flags: tuple[str, ...] = ()) -> Path:
    """Compile and link `target`, atomically. Raises NoLibraryError with the compiler's words."""
    if sys.platform not in ("linux", "darwin"):
        raise NoLibraryError(f"the compiled kernels are for Linux and macOS, not {sys.platform}")
    cxx = shlex.split(compiler())
    extra = (*flags, *flags_of_the_user())
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:

        def compile_one(file: Path) -> str:
            out = str(Path(folder) / f"{file.stem}.o")
            run([*cxx, *FLAGS, *QUIET, *OF_FILE.get(file.name, ()), *extra, "-c", str(file), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources()))
        made = Path(folder) / target.name
        libraries = ["-lrt"] if sys.platform == "linux" else []  # shm_open, before glibc 2.34
        run([*cxx, "-shared", "-pthread", *extra, *objects, *libraries, "-o", str(made)])
        made.replace(target)
    return target


def recipe() -> str:
    """A hash of all that `build` depends on. Raises NoLibraryError where there is no compiler that runs."""
    cxx = shlex.split(compiler())
    machine = (sys.platform, platform.machine())
    parts = [repr((machine, cxx, run([*cxx, "--version"]), flags_of_the_user())).encode()]
    # This file too: it holds the flags.
    for file in (Path(__file__), *sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])):
        parts += [file.name.encode(), file.read_bytes()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def run(command: list[str]) -> str:
    """What one command of the compiler prints."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoLibraryError(f"the C++ compiler {command[0]} does not run: {error}") from error
    if result.returncode:
        raise NoLibraryError(f"{shlex.join(command)} failed:\n{result.stderr.strip()[-4000:]}")
    return result.stdout


def build_or_say_why() -> bool:
    """Build if `LIBRARY` is of another recipe; where that fails leave the reason in `FAILURE` and no library.

    Returns whether there is one.
    """
    FAILURE.unlink(missing_ok=True)
    try:
        wanted = recipe()
        if not (LIBRARY.exists() and RECIPE.exists() and RECIPE.read_text() == wanted):
            RECIPE.unlink(missing_ok=True)  # nothing vouches for a library that is being replaced
            build(LIBRARY)
            RECIPE.write_text(wanted)
    except NoLibraryError as error:
        LIBRARY.unlink(missing_ok=True)
        FAILURE.write_text(str(error))
        return False
    return True


if __name__ == "__main__":
    if not build_or_say_why():
        sys.exit(FAILURE.read_text())
    print(LIBRARY)
