"""HIP's compiler and launches on the host: the plugin's kernel source, built by g++ and run block by block."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo_rocm import kernels
from octavo_rocm.hip import pointers_to
from octavo_rocm.products import Products

FOLDER = Path(__file__).parent


class HostHip:
    """Implements `octavo_rocm.hip.Hip`."""

    def compile(self, source: str, options: Sequence[str]) -> bytes:
        whole = "\n".join(((FOLDER / "host_device.h").read_text(), source, (FOLDER / "host_launch.h").read_text()))
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, "kernels.so")
            command = [
                "g++",
                "-x",
                "c++",
                "-std=c++17",
                "-O1",
                "-shared",
                "-fPIC",
                "-w",
                *options,
                "-o",
                str(built),
                "-",
            ]
            done = subprocess.run(command, input=whole, text=True, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr
            return built.read_bytes()

    def load(self, code: bytes, names: Sequence[str]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(code)
            file.flush()
            library = ctypes.CDLL(file.name)
        return {name: getattr(library, f"launch_{name}") for name in names}

    def launch(self, function: Any, grid: int, threads: int, arguments: Sequence[Any], stream: int) -> None:
        function(grid, threads, pointers_to(arguments))


def host_products(weight_format: str, dtype: torch.dtype, wave: int = 64) -> Products:
    """The kernels of one build."""
    hip = HostHip()
    chosen = kernels.defines(weight_format, str(dtype).removeprefix("torch."), wave)
    code = hip.compile((kernels.FOLDER / "gemv.hip").read_text(), chosen)
    return Products(hip, hip.load(code, kernels.NAMES), weight_format, wave)
