"""HIP's compiler and launches through ctypes: what a ROCm wheel of torch brings is enough, no SDK and no `hipcc`.

    source, options --hiprtc--> code object --(kept on disk)--> module --> functions --> launches on torch's stream

Code objects are kept in $XDG_CACHE_HOME/octavo (~/.cache/octavo), by source, options and version of the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Protocol

from octavo_rocm.software import torch_libraries

RUNTIME = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")
COMPILER = ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", *RUNTIME)
"""Old releases have the compiler in the runtime's library."""


class HipError(Exception):
    """HIP is absent, or refused something; the message says what."""


class Hip(Protocol):
    """What is needed of HIP; a test may run kernels elsewhere."""

    def compile(self, source: str, options: Sequence[str]) -> bytes: ...
    def load(self, code: bytes, names: Sequence[str]) -> dict[str, Any]: ...
    def launch(self, function: Any, grid: int, threads: int, arguments: Sequence[Any], stream: int) -> None: ...


def library(names: Iterable[str], symbol: str) -> ctypes.CDLL:
    """The first of these libraries that has the symbol: torch's own copy, else the system's. Raises HipError."""
    folder = torch_libraries()
    places = [str(folder / name) for name in names if folder is not None and (folder / name).exists()]
    for place in (*places, *names):
        try:
            found = ctypes.CDLL(place)
        except OSError:
            continue
        if hasattr(found, symbol):
            return found
    raise HipError(f"no library of ROCm has {symbol}; looked for {', '.join(names)}")


class HipLibraries:
    """Implements `Hip` by ROCm's own libraries. Raises HipError if they are not there."""

    def __init__(self) -> None:
        self._compiler = library(COMPILER, "hiprtcCompileProgram")
        self._runtime = library(RUNTIME, "hipModuleLaunchKernel")

    def version(self) -> str:
        """Of the compiler."""
        major, minor = c_int(), c_int()
        self._check(self._compiler.hiprtcVersion(byref(major), byref(minor)), "hiprtcVersion")
        build = getattr(self._compiler, "_name", "")
        return f"{major.value}.{minor.value} {Path(build).resolve() if build else ''}"

    def compile(self, source: str, options: Sequence[str]) -> bytes:
        """The code object. Raises HipError with the compiler's first lines."""
        rtc, program, size = self._compiler, c_void_p(), c_size_t()
        self._check(
            rtc.hiprtcCreateProgram(byref(program), source.encode(), b"octavo.hip", 0, None, None),
            "hiprtcCreateProgram",
        )
        try:
            texts = (c_char_p * len(options))(*(option.encode() for option in options))
            if rtc.hiprtcCompileProgram(program, len(options), texts):
                rtc.hiprtcGetProgramLogSize(program, byref(size))
                log = ctypes.create_string_buffer(size.value + 1)
                rtc.hiprtcGetProgramLog(program, log)
                raise HipError(f"hiprtc cannot compile for {options[0]}: {log.value.decode(errors='replace')[:2000]}")
            self._check(rtc.hiprtcGetCodeSize(program, byref(size)), "hiprtcGetCodeSize")
            code = ctypes.create_string_buffer(size.value)
            self._check(rtc.hiprtcGetCode(program, code), "hiprtcGetCode")
            return code.raw
        finally:
            rtc.hiprtcDestroyProgram(byref(program))

    def load(self, code: bytes, names: Sequence[str]) -> dict[str, Any]:
        """The functions of a code object, on the current card; they stay loaded as long as the process lives."""
        module = c_void_p()
        self._check(self._runtime.hipModuleLoadData(byref(module), code), "hipModuleLoadData")
        functions = {}
        for name in names:
            function = c_void_p()
            self._check(self._runtime.hipModuleGetFunction(byref(function), module, name.encode()), name)
            functions[name] = function
        return functions

    def launch(self, function: Any, grid: int, threads: int, arguments: Sequence[Any], stream: int) -> None:
        """arguments: ctypes values in the kernel's order."""
        pointers = pointers_to(arguments)
        status = self._runtime.hipModuleLaunchKernel(
            function, grid, 1, 1, threads, 1, 1, 0, c_void_p(stream), pointers, None
        )
        self._check(status, "hipModuleLaunchKernel")

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise HipError(f"{what} returned {status}")


def pointers_to(arguments: Sequence[Any]) -> Any:
    """The array of addresses that a launch takes."""
    return (c_void_p * len(arguments))(*(ctypes.cast(ctypes.pointer(a), c_void_p) for a in arguments))


def compiled(hip: HipLibraries, source: str, options: Sequence[str]) -> bytes:
    """The code object, from disk if it was compiled before. Without a cache it costs each start."""
    facts = "\n".join((source, *options, hip.version()))
    path = cache_folder() / f"hip-{hashlib.sha256(facts.encode()).hexdigest()[:32]}.hsaco"
    try:
        return path.read_bytes()
    except OSError:
        code = hip.compile(source, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass
    return code


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
