"""The two runtimes that give torch a TPU, and which of them serves. Looks at what is installed; imports neither."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from octavo.plugin import Device

TORCH_TPU = "torch_tpu"
TORCH_XLA = "torch_xla"

NEEDED = {TORCH_TPU: ("torch_tpu", "libtpu", "jax"), TORCH_XLA: ("torch_xla", "libtpu")}
"""Runtime -> the modules without which it serves no chip."""


class Runtime(Device, Protocol):
    """What the rest of this platform asks of a runtime beside the contract of a device.

    has_mosaic: whether Pallas kernels run; their compiler, Mosaic, is part of libtpu.
    compile_backend: what torch.compile is given to make one program of a whole step.
    """

    @property
    def has_mosaic(self) -> bool: ...
    @property
    def compile_backend(self) -> Any: ...


def open_device(index: int, options: Mapping[str, object]) -> Runtime:
    """The device of the runtime in `options`, which are those of the platform with a runtime chosen.

    Raises RuntimeError if the runtime does not divide work over chips and is asked to.
    """
    chips, hbm_bytes = int(str(options["chips"])), int(str(options["hbm_bytes"]))
    cache_dir = str(options["cache_dir"])
    if options["runtime"] == TORCH_XLA:
        from octavo_tpu.xla_device import XlaDevice

        return XlaDevice(index, chips=chips, hbm_bytes=hbm_bytes, cache_dir=cache_dir)
    if chips > 1:
        raise RuntimeError(f"chips={chips}: only --platform-opt runtime={TORCH_XLA} divides a model over chips")
    from octavo_tpu.device import TpuDevice

    return TpuDevice(index, hbm_bytes=hbm_bytes, cache_dir=cache_dir)


def runtime_choice(text: str) -> str:
    """Parse the option `runtime`."""
    if text == "auto":
        return text
    if text not in NEEDED:
        raise ValueError(f"runtime must be auto, {TORCH_TPU} or {TORCH_XLA}, not {text!r}")
    if find_spec(text) is None:
        raise ValueError(f"{text} is not installed: {install(text)}")
    return text


def choose(asked: str) -> str:
    """The runtime to use: the one asked for; for "auto" torch_tpu, unless only torch_xla is there."""
    if asked != "auto":
        return asked
    return TORCH_XLA if find_spec(TORCH_TPU) is None and find_spec(TORCH_XLA) is not None else TORCH_TPU


def missing_software() -> str:
    """What to install before a chip can be used; empty if one of the runtimes has all that it needs."""
    missing = {runtime: [name for name in needed if find_spec(name) is None] for runtime, needed in NEEDED.items()}
    if not all(missing.values()):
        return ""
    runtime = choose("auto")
    return f"there is a TPU, but {', '.join(missing[runtime])} is not installed: {install(runtime)}"


def install(runtime: str) -> str:
    """The command that brings a runtime with all that it needs."""
    return f'pip install "octavo-tpu[{runtime.replace("_", "-")}]"'
