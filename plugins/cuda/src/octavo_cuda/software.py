"""Whether the installed packages fit the hardware, read off the disk: importing torch would take seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

CUDA_LIBRARIES = ("libtorch_cuda.so", "torch_cuda.dll")
"""What only a CUDA build of torch holds."""


def missing_software() -> str:
    """Why torch cannot drive the cards; empty if it can."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    libraries = Path(spec.origin).parent / "lib"
    if not any((libraries / name).exists() for name in CUDA_LIBRARIES):
        return "the installed torch is not a CUDA build; install torch from an index of CUDA builds"
    return ""


def has_triton() -> bool:
    """Whether Triton is installed; CUDA builds of torch bring it on Linux."""
    return find_spec("triton") is not None
