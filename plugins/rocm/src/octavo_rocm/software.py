"""Whether the installed packages fit the hardware, read off the disk: importing torch would take seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

HIP_LIBRARIES = ("libtorch_hip.so", "torch_hip.dll")
"""What only a ROCm build of torch holds."""


def torch_libraries() -> Path | None:
    """The folder of torch's libraries; a ROCm wheel brings HIP's there too. None if torch is not installed."""
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"


def missing_software() -> str:
    """Why torch cannot drive the cards; empty if it can."""
    folder = torch_libraries()
    if folder is None:
        return "torch is not installed"
    if not any((folder / name).exists() for name in HIP_LIBRARIES):
        return "the installed torch is not a ROCm build; install torch from an index of ROCm builds"
    return ""


def has_triton() -> bool:
    """Whether Triton is installed; ROCm builds of torch bring it on Linux."""
    return find_spec("triton") is not None
