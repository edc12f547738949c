"""Compiles `host.cpp` into a small library against the SYCL runtime of this environment, once per version of both.

torch's XPU build depends on the package `intel-sycl-rt`, which brings SYCL's headers and libraries into the
environment's `include` and `lib`; a C++17 compiler is all that is missing. The library is kept in
`$XDG_CACHE_HOME/octavo` (`~/.cache/octavo`), as the environment may not be writable. CXX names the compiler.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "host.cpp"
RUNTIME = "intel-sycl-rt"
FIRST = 2026
"""Of its versions the first with all that compiling a kernel takes: 2025.1 has no compiler, and those of 2025.2 and
2025.3 link files that their packages leave out."""
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wno-deprecated-declarations")


class NoLibraryError(Exception):
    """There is no library, and this is why."""


def compiler() -> str:
    """The C++ compiler: CXX, or the first one on the path. Raises NoLibraryError."""
    if named := os.environ.get("CXX"):
        return named
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise NoLibraryError("no C++ compiler was found; install g++, or name one by CXX")
    return found


def runtime_version() -> str:
    """The version of the SYCL runtime that is installed here. Raises NoLibraryError."""
    try:
        return version(RUNTIME)
    except PackageNotFoundError:
        raise NoLibraryError(f"the package {RUNTIME} is not installed; torch's XPU build brings it") from None


def objection() -> str:
    """Why the SYCL runtime of this environment compiles no kernels; empty if it does. Raises NoLibraryError."""
    found = runtime_version()
    if int(found.partition(".")[0]) >= FIRST:
        return ""
    return (
        f"{RUNTIME} {found} cannot compile them; {FIRST}.0, which torch 2.13's XPU build brings, is the first that can"
    )


def cache_folder() -> Path:
    """Where compiled things are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "octavo", "xpu")


def build(prefix: Path | None = None) -> Path:
    """The library, compiled if it is not there yet. prefix: of the environment that holds the SYCL runtime.

    Raises NoLibraryError with the compiler's words."""
    prefix = prefix or Path(sys.prefix)
    if not (prefix / "include" / "sycl" / "sycl.hpp").exists():
        raise NoLibraryError(f"{prefix}/include has no SYCL headers, though {RUNTIME} {runtime_version()} brings them")
    command = [*shlex.split(compiler()), *FLAGS, f"-I{prefix}/include", str(SOURCE)]
    command += [f"-L{prefix}/lib", "-lsycl", f"-Wl,-rpath,{prefix}/lib"]
    key = hashlib.sha256("\n".join([*command, runtime_version(), SOURCE.read_text()]).encode()).hexdigest()[:16]
    target = cache_folder() / f"host-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        try:
            result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        except OSError as error:
            raise NoLibraryError(f"the C++ compiler {command[0]} does not run: {error}") from error
        if result.returncode:
            raise NoLibraryError(f"{shlex.join(command)} failed:\n{result.stderr.strip()[-4000:]}")
        made.replace(target)
    return target
