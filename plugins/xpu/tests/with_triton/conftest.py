"""Triton's kernels on Intel's OpenCL CPU device, by Triton's own compiler for Intel's GPUs and a driver for tests.

    a kernel is launched with tensors on the host
      -> triton-xpu compiles it for a GPU without matrix units (`dpas`), down to SPIR-V
      -> the words that only a GPU understands are taken out; they say what the module may use, and it uses none of it
      -> the OpenCL CPU device runs it on the tensors' own memory

A test that needs the simulator fails where there is none.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

INTEL_CAPABILITIES = {5619, 5892, 6115}
"""VectorAnyINTEL, KernelAttributesINTEL, BFloat16ConversionINTEL."""
INTEL_MODES = {5893}
"""MaxWorkgroupSizeINTEL."""
OP_EXTENSION, OP_EXECUTION_MODE, OP_CAPABILITY = 10, 16, 17
HEADER = 5
SHARED = 64 << 10
M_TRIM_THRESHOLD, M_TOP_PAD = -1, -2
"""Of glibc's mallopt."""
NUMBERS: dict[str, Any] = {"i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "fp32": np.float32}


def for_the_cpu(module: bytes) -> bytes:
    """A SPIR-V module without the declarations that the CPU device refuses."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    kept, at = list(words[:HEADER]), HEADER
    while at < len(words):
        length, op = words[at] >> 16, words[at] & 0xFFFF
        instruction = words[at : at + length]
        dropped = (
            (op == OP_CAPABILITY and instruction[1] in INTEL_CAPABILITIES)
            or (op == OP_EXECUTION_MODE and instruction[2] in INTEL_MODES)
            or (op == OP_EXTENSION and struct.pack(f"<{length - 1}I", *instruction[1:]).startswith(b"SPV_INTEL_"))
        )
        kept += () if dropped else instruction
        at += length
    return struct.pack(f"<{len(kept)}I", *kept)


def properties(*, matrix: bool) -> dict[str, Any]:
    """What Triton's compiler asks of a device. matrix: it has matrix units and block loads, as Xe-HPC and Xe2 have."""
    return {
        "architecture": 0,
        "sub_group_sizes": [16, 32],
        "max_work_group_size": 1024,
        "max_num_sub_groups": 64,
        "max_shared_mem": SHARED,
        "has_fp64": True,
        "has_subgroup_matrix_multiply_accumulate": matrix,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": matrix,
        "has_subgroup_2d_block_io": matrix,
        "has_bfloat16_conversions": matrix,
    }


class Driver:
    """As much of a Triton driver as compiling and launching ask for. device: None compiles and runs nothing.

    `made`: the modules in SPIR-V of every kernel.
    """

    def __init__(self, device: OpenClDevice | None, *, matrix: bool) -> None:
        from triton.backends.compiler import GPUTarget

        self._device, self.utils = device, self
        self._target = GPUTarget("xpu", properties(matrix=matrix), 32)
        self.matrix = matrix
        self.made: dict[str, list[bytes]] = {}

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED}

    def load_binary(self, name: str, binary: bytes, *rest: object) -> tuple[Any, Any, int, int]:
        self.made.setdefault(name, []).append(binary)
        function = self._device.kernel(name, binary) if self._device else None
        return object(), function, 0, 0

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        kinds = list(src.signature.values())

        def launch(x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            values = rest[len(rest) - len(kinds) :]
            arguments = [(kind, value) for kind, value in zip(kinds, values, strict=True) if kind != "constexpr"]
            if self._device:
                items = metadata.num_warps * metadata.threads_per_warp
                self._device.launch(function, (x, y, z), items, arguments, metadata.shared)

        return launch


class OpenClDevice:
    """Intel's OpenCL CPU device, which reads the host's memory as it is."""

    def __init__(self, folder: Path) -> None:
        driver = Path(sys.prefix, "lib", "libintelocl.so")
        assert driver.exists(), f"the simulator is missing: {driver}; pip install intel-opencl-rt"
        # The loader of OpenCL drivers looks into the system's folder, where packages of Python install nothing.
        (folder / "intel.icd").write_text(f"{driver}\n")
        os.environ["OCL_ICD_VENDORS"] = str(folder)
        # Its compiler gives memory back and asks for it again at every turn, which takes half of the time.
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(M_TOP_PAD, 64 << 20)
        import pyopencl

        self._cl = pyopencl
        [device] = [d for p in pyopencl.get_platforms() for d in p.get_devices(pyopencl.device_type.CPU)]
        self._context = pyopencl.Context([device])
        self._queue = pyopencl.CommandQueue(self._context)
        self.num_launched: dict[str, int] = {}

    def kernel(self, name: str, module: bytes) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._cl.CompilerWarning)  # the compiler tells how it vectorized
            return self._cl.Kernel(self._cl.Program(self._context, for_the_cpu(module)).build(), name)

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], items: int, arguments: list[tuple[str, Any]], shared: int
    ) -> None:
        given: list[Any] = [self._argument(kind, value) for kind, value in arguments]
        given += [self._cl.LocalMemory(shared)] if shared else []
        assert kernel.num_args == len(given), f"{kernel.function_name}: {kernel.num_args} arguments, not {len(given)}"
        kernel.set_args(*given)
        self._cl.enqueue_nd_range_kernel(self._queue, kernel, (grid[0] * items, *grid[1:]), (items, 1, 1))
        self._queue.finish()
        self.num_launched[kernel.function_name] = self.num_launched.get(kernel.function_name, 0) + 1

    def _argument(self, kind: str, value: Any) -> Any:
        if not kind.startswith("*"):
            return NUMBERS[kind](value)
        memory = (ctypes.c_byte * 1).from_address(value.data_ptr())
        return self._cl.SVM(np.ctypeslib.as_array(memory))


@pytest.fixture(scope="session")
def opencl(tmp_path_factory: pytest.TempPathFactory) -> OpenClDevice:
    return OpenClDevice(tmp_path_factory.mktemp("opencl"))


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Triton with Intel's compiler, which asks a C++ program for the name of the GPU: here it has none."""
    from triton.backends import backends

    assert "intel" in backends, "the compiler is missing: pip install --no-deps triton-xpu"
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    ask = backends["intel"].compiler.__init__.__globals__
    ask["compile_module_from_src"] = lambda source, name: SimpleNamespace(parse_device_arch=lambda number: "")


def active(driver: Driver) -> Iterator[Any]:
    """Triton with this driver, and with no kernel of another one."""
    from triton.runtime import driver as drivers

    import octavo.triton.attention_backend as attention
    from octavo.triton import activation, bookkeeping, gemv, int4, logits, norm, rope, sampling, skinny, topk_topp

    for module in (activation, attention, bookkeeping, gemv, int4, logits, norm, rope, sampling, skinny, topk_topp):
        for value in vars(module).values():
            getattr(value, "device_caches", {}).clear()
    drivers.set_active(driver)
    yield driver


@pytest.fixture
def on_cpu(compiler: None, opencl: OpenClDevice) -> Iterator[Any]:
    """Kernels run; the OpenCL device counts them."""
    for _ in active(Driver(opencl, matrix=False)):
        opencl.num_launched.clear()
        yield opencl


@pytest.fixture(params=[False, True], ids=["no dpas", "dpas"])
def for_gpu(compiler: None, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Kernels are only compiled, with and without matrix units."""
    yield from active(Driver(None, matrix=request.param))
