"""The compiled library, if there is one: found, checked and bound once; and how a step calls its functions.

A function of a step takes one flat structure of pointers and numbers. So a step can be recorded as a list of (function,
bytes of its arguments) and run again without Python (`tape.py`). What holds for whoever calls one:

- results and temporaries come from `empty`: within a recording that is memory of the tape;
- what differs from step to step is read by the function from memory whose address stays.

The environment has two switches, read when the library is first asked for:

- OCTAVO_CPU_NATIVE=0 leaves it alone: the pure-torch tier runs;
- OCTAVO_CPU_ISA=generic | avx2 | avx512 | avx512_bf16 | amx | neon takes that instruction set instead of the best one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Protocol

from octavo_cpu.kernels.build import FAILURE, LIBRARY, NoLibraryError

if TYPE_CHECKING:
    import torch

ABI = 7
"""`OCTAVO_ABI` of `kernels/api.h`, which this file mirrors."""

ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx", "neon")

DTYPES = ("bfloat16", "float32")

BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""GGUF block types: (columns, bytes) of one block."""

GATES = (None, "silu", "gelu", "gelu_tanh")


StepFunction = Callable[[ctypes.Structure], None]


class Recorder(Protocol):
    """Takes down the calls of a step."""

    def append(self, function: int, args: bytes) -> None: ...


class Recording(threading.local):
    """The recorder of this thread's step, if one is being recorded."""

    recorder: Recorder | None = None


recording = Recording()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of undefined content. While a step is recorded torch takes it from the tape's memory."""
    import torch  # deferred, as hooks ask for the library before anything needs torch

    return torch.empty(shape, dtype=dtype)


@cache
def step_function(name: str) -> StepFunction:
    """`void octavo_<name>(const Args*)` as a function of the structure of its arguments, recorded where a step is.

    The library reads the structure during the call only. Raises NoLibraryError if there is no library.
    """
    function = getattr(load(), f"octavo_{name}")
    function.argtypes, function.restype = [ctypes.c_void_p], None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    addressof = ctypes.addressof

    def call(args: ctypes.Structure) -> None:
        function(addressof(args))
        if (recorder := recording.recorder) is not None:
            recorder.append(address, bytes(args))

    return call


def bind(path: str) -> ctypes.CDLL:
    """Load a library and declare its functions. Raises NoLibraryError if it is none, or of another version."""
    try:
        library = ctypes.CDLL(path)
        found = library.octavo_abi()
    except (OSError, AttributeError) as error:
        raise NoLibraryError(f"the compiled kernels do not load: {error}") from error
    if found != ABI:
        raise NoLibraryError(f"the compiled kernels are of version {found}, not {ABI}: reinstall octavo-cpu")
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.octavo_use_isa.argtypes = [ctypes.c_char_p]
    library.octavo_isa.restype = ctypes.c_char_p
    library.octavo_set_threads.argtypes = [ctypes.c_int]
    library.octavo_set_threads.restype = None
    library.octavo_packed_bytes.argtypes = [ctypes.c_int, ctypes.c_int, size, size]
    library.octavo_packed_bytes.restype = size
    library.octavo_pack.argtypes = [ctypes.c_int, ctypes.c_int, size, size, pointer, pointer, pointer]
    library.octavo_pack.restype = None
    library.octavo_large_pages.argtypes = [pointer, size]
    library.octavo_large_pages.restype = None
    library.octavo_group_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, pointer]
    library.octavo_group_open.restype = pointer
    library.octavo_group_unlink.argtypes = [ctypes.c_char_p]
    library.octavo_group_unlink.restype = None
    library.octavo_group_close.argtypes = [pointer]
    library.octavo_group_close.restype = None
    return library


@cache
def load() -> ctypes.CDLL:
    """The library with its instruction set chosen. Raises NoLibraryError with the reason."""
    if os.environ.get("OCTAVO_CPU_NATIVE") == "0":
        raise NoLibraryError("the compiled kernels are switched off by OCTAVO_CPU_NATIVE=0")
    if not LIBRARY.exists():
        why = FAILURE.read_text() if FAILURE.exists() else "they were not built: run python -m octavo_cpu.kernels.build"
        raise NoLibraryError(f"octavo-cpu has no compiled kernels here: {why}")
    library = bind(str(LIBRARY))
    wanted = os.environ.get("OCTAVO_CPU_ISA", "")
    if wanted not in ("", *ISAS):
        raise NoLibraryError(f"OCTAVO_CPU_ISA must be one of {', '.join(ISAS)}, not {wanted!r}")
    if not library.octavo_use_isa(wanted.encode()):
        raise NoLibraryError(f"OCTAVO_CPU_ISA={wanted}: this CPU has no {wanted}")
    return library


@cache
def why_not() -> str:
    """Why there is no library; empty if there is one."""
    try:
        load()
    except NoLibraryError as error:
        return str(error)
    return ""
