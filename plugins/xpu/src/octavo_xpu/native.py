"""SYCL kernels from Python: compiled at run time for the device of a queue, launched by name.

    runtime = Runtime(queue)                       a device's queue; the library of `kernels/host.cpp`
    module  = runtime.module("small.cpp", NUMBER="FLOAT32")        compiled at first use, kept on disk
    kernel  = module["rms_norm"]
    kernel((rows, 1, 1), (1, 1, 64), x, weight, out, size, eps)    a tensor, None, an int or a float each

What a kernel is told is of three kinds only: a pointer, an int64, a float. The sources declare nothing else.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from octavo_xpu.kernels.build import HERE, NoLibraryError, build, cache_folder

if TYPE_CHECKING:
    import torch

ABI = 2
"""`octavo_xpu_abi` of `kernels/host.cpp`, which this file mirrors."""

LANES = 16
"""Items of a sub-group, as in `kernels/numbers.h`: every Intel GPU since Gen9 has them."""

NUMBERS = {"bfloat16": "BFLOAT16", "float16": "FLOAT16", "float32": "FLOAT32"}
"""Dtypes of activations -> NUMBER of the sources."""

MATRIX = {"bfloat16": 1, "float16": 2, "int8": 4}
"""Dtypes that matrix units multiply -> their bit in `octavo_xpu_matrix`."""
XMX, EMULATED = 1, 2
"""MATRIX of the sources, see `kernels/matrix.h`; 0 stands for no matrix units."""

Queue = Callable[[], int]
"""Address of the `sycl::queue` to launch on: of the stream that is current when it is called."""

Groups = tuple[int, int, int]


@cache
def load() -> ctypes.CDLL:
    """The library, compiled if need be. Raises NoLibraryError with the reason."""
    # What is compiled for a device is kept by SYCL itself, by source, options, device and driver.
    os.environ.setdefault("SYCL_CACHE_PERSISTENT", "1")
    os.environ.setdefault("SYCL_CACHE_DIR", str(cache_folder() / "device"))
    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"the compiled host library does not load: {error}") from error
    if (found := library.octavo_xpu_abi()) != ABI:
        raise NoLibraryError(f"the host library is of version {found}, not {ABI}: remove {path}")
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.octavo_xpu_error.restype = text
    library.octavo_xpu_cpu_queue.argtypes, library.octavo_xpu_cpu_queue.restype = [], pointer
    library.octavo_xpu_describe.argtypes = [pointer, text, ctypes.c_int64]
    library.octavo_xpu_matrix.argtypes = [pointer]
    library.octavo_xpu_build.argtypes = [pointer, text]
    library.octavo_xpu_build.restype = pointer
    library.octavo_xpu_kernel.argtypes, library.octavo_xpu_kernel.restype = [pointer, text], pointer
    library.octavo_xpu_launch.argtypes = [pointer, pointer, pointer, pointer, text, pointer, ctypes.c_int]
    return library


def last_error() -> str:
    """What the library says of its last failure on this thread."""
    message: bytes = load().octavo_xpu_error()
    return message.decode(errors="replace")


def source_text(name: str) -> str:
    """A file of `kernels` with its own headers in place: the device's compiler sees no folder."""
    text = (HERE / name).read_text()
    for header in re.findall(r'^#include "(.+)"$', text, re.MULTILINE):
        text = text.replace(f'#include "{header}"', source_text(header))
    return text


class Runtime:
    """The kernels of one device. wait: every launch returns when it is done, for tensors that the host reads next.
    emulate: matrix units are computed, where the device has none."""

    def __init__(self, queue: Queue, *, wait: bool = False, emulate: bool = False) -> None:
        self._library = load()
        self.queue = queue
        self.wait = wait
        self.emulate = emulate
        self._units: int | None = None
        self._modules: dict[tuple[str, tuple[tuple[str, str], ...]], Module] = {}

    def describe(self) -> str:
        """The device's name and driver. Raises NoLibraryError if it cannot compile kernels."""
        text = ctypes.create_string_buffer(256)
        if self._library.octavo_xpu_describe(self.queue(), text, len(text)):
            raise NoLibraryError(last_error())
        return text.value.decode(errors="replace")

    def matrix(self, dtype: str) -> int:
        """MATRIX of the sources for products of `dtype`; 0: there are no matrix units for it."""
        bit = MATRIX.get(dtype, 0)
        if self._units is None:
            self._units = self._library.octavo_xpu_matrix(self.queue())
        return XMX if self._units & bit else EMULATED if bit and self.emulate else 0

    def module(self, source: str, **defines: object) -> Module:
        """A source with its definitions; the same one for the same arguments."""
        key = (source, tuple(sorted((name, str(value)) for name, value in defines.items())))
        if key not in self._modules:
            self._modules[key] = Module(self, *key)
        return self._modules[key]


class Module:
    """One source, compiled for a device when its first kernel is asked for."""

    def __init__(self, runtime: Runtime, source: str, defines: tuple[tuple[str, str], ...]) -> None:
        self._runtime, self.source, self.defines = runtime, source, defines
        self._kernels: dict[str, Kernel] = {}
        self._bundle: int | None = None

    def __getitem__(self, name: str) -> Kernel:
        """Raises NoLibraryError with the compiler's words."""
        if name not in self._kernels:
            self._kernels[name] = Kernel(self._runtime, self._compiled(), name)
        return self._kernels[name]

    def _compiled(self) -> int:
        if self._bundle is None:
            head = "".join(f"#define {name} {value}\n" for name, value in self.defines)
            bundle = load().octavo_xpu_build(self._runtime.queue(), (head + source_text(self.source)).encode())
            if not bundle:
                raise NoLibraryError(f"{self.source} does not compile for this device: {last_error()}")
            self._bundle = bundle
        return self._bundle


def float_bits(x: float) -> int:
    """The bits of a float32."""
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits


class Kernel:
    """A function of a module, to be called with its groups, the items of a group and its arguments."""

    def __init__(self, runtime: Runtime, bundle: int, name: str) -> None:
        self.name = name
        self._runtime = runtime
        self._launch = load().octavo_xpu_launch
        self._address = load().octavo_xpu_kernel(bundle, name.encode())
        if not self._address:
            raise NoLibraryError(f"there is no kernel {name}: {last_error()}")

    def __call__(self, groups: Groups, local: Groups, *args: torch.Tensor | int | float | None) -> None:
        """Launch on the current queue; nothing happens where there are no groups. Raises RuntimeError."""
        if 0 in groups:
            return
        kinds, values = "", []
        for arg in args:
            if arg is None:
                kinds, value = kinds + "p", 0
            elif isinstance(arg, int):
                kinds, value = kinds + "l", arg & 0xFFFFFFFFFFFFFFFF
            elif isinstance(arg, float):
                kinds, value = kinds + "f", float_bits(arg)
            else:
                kinds, value = kinds + "p", arg.data_ptr()
            values.append(value)
        failed = self._launch(
            self._runtime.queue(),
            self._address,
            (ctypes.c_int64 * 3)(*groups),
            (ctypes.c_int64 * 3)(*local),
            kinds.encode(),
            (ctypes.c_uint64 * len(values))(*values),
            self._runtime.wait,
        )
        if failed:
            raise RuntimeError(f"kernel {self.name}: {last_error()}")


def pitch(t: torch.Tensor, *dims: int) -> tuple[int, ...]:
    """Strides of some dimensions of a tensor whose last is contiguous."""
    assert t.stride(-1) == 1 or t.shape[-1] <= 1, f"the last dimension must be contiguous: {t.stride()}"
    return tuple(t.stride(dim) for dim in dims)
