"""HIP C++ kernels, compiled for the card at their first use: the source, and the choices that a build makes."""

from __future__ import annotations

from pathlib import Path

from octavo_rocm.targets import Target

FOLDER = Path(__file__).parent
NAMES = ("gemv_1", "gemv_2", "gemv_3", "gemv_4", "unpack")
"""The kernels of `gemv.hip`."""
MOST_TOKENS = 4
THREADS = 256

ROWS = {"Plain": 2, "Int4": 4, "Q8_0": 4, "Q4_0": 4, "Q4_K": 4}
"""Format of W -> rows of a wave: packed rows are read so fast that x, read once for all of them, would cost more."""


def source() -> str:
    """`gemv.hip` behind what it asks of a GPU."""
    return (FOLDER / "device.h").read_text() + (FOLDER / "gemv.hip").read_text()


def defines(weight_format: str, dtype: str, wave: int) -> list[str]:
    """The choices of one build. dtype: torch's name, bfloat16 or float16."""
    chosen = [f"-DWAVE={wave}", f"-DFORMAT={weight_format}", f"-DROWS={ROWS[weight_format]}"]
    return [*chosen, "-DBFLOAT16"] if dtype == "bfloat16" else chosen


def options(weight_format: str, dtype: str, target: Target, arch: str) -> list[str]:
    """What the compiler is given for a card of this architecture."""
    return [f"--offload-arch={arch}", "-O3", "-std=c++17", *defines(weight_format, dtype, target.wave)]
