"""A kernel pack over `intel-extension-for-pytorch` 2.8, the last one: its development has ended, its repository is
archived. It loads beside torch 2.8 alone, whose XPU build is its own.

    --attention-backend ipex      --kernel rms_norm=ipex

Nothing here is chosen by itself. The package is imported when its kernels are asked for, as it changes torch; then it
has to pass a test on the device, and where it does not load or not pass, every kernel refuses with the reason.

Shapes: T tokens, D features or head size, H heads.
"""

from __future__ import annotations

import contextlib
import io
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from octavo.plugin import YES, Device, KernelRegistry, OpContext, Support, hookimpl, no

Tensor = torch.Tensor

API = "1.0"
PLATFORMS = frozenset({"xpu"})

PACKAGE = "intel_extension_for_pytorch"
PROVIDER = "ipex"
PRIORITY = -10
DTYPES = ("bfloat16", "float16", "float32")
ALLOWED = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-4}
"""Largest error of the test at load, as a share of the largest number."""


class NoPackageError(Exception):
    """The package cannot be used, and this is why."""


@cache
def library() -> Any:
    """The imported package. Raises NoPackageError."""
    if find_spec(PACKAGE) is None:
        raise NoPackageError("the package intel-extension-for-pytorch is not installed")
    words = io.StringIO()
    try:
        # With another torch it prints why, and then fails to end the process.
        with contextlib.redirect_stdout(words):
            package = import_module(PACKAGE)
            import_module(f"{PACKAGE}.llm.modules")
            import_module(f"{PACKAGE}.llm.functional")
    except (Exception, SystemExit) as error:
        reason = words.getvalue().strip() or f"{type(error).__name__}: {error}"
        raise NoPackageError(
            f"intel-extension-for-pytorch does not load with torch {torch.__version__}: {reason}"
        ) from error
    return package


@cache
def objection(torch_device: torch.device) -> str:
    """Why the package is of no use on a device; empty if it computes right there."""
    try:
        functional = library().llm.functional
        for dtype in DTYPES:
            check_norm(functional, torch_device, dtype)
    except NoPackageError as error:
        return str(error)
    except Exception as error:  # whatever a foreign operator raises
        return f"intel-extension-for-pytorch fails on {torch_device}: {type(error).__name__}: {error}"
    return ""


def check_norm(functional: Any, device: torch.device, dtype: str) -> None:
    """Raises NoPackageError if a small norm comes out wrong."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 64, generator=generator), torch.randn(64, generator=generator)
    given = [t.to(getattr(torch, dtype)).to(device) for t in (x, weight)]
    found = functional.rms_norm(*given, 1e-6).float().cpu()
    x, weight = (t.float().cpu() for t in given)
    close("rms_norm", dtype, found, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight)


def close(what: str, dtype: str, found: Tensor, expected: Tensor) -> None:
    """Raises NoPackageError unless the results agree."""
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= ALLOWED[dtype]:
        raise NoPackageError(f"{what} of intel-extension-for-pytorch is wrong in {dtype} here: off by {error:.1e}")


def takes(device: Device) -> Any:
    """The `supports` of the ops, for one device."""

    def supports(context: OpContext) -> Support:
        if context.dtype not in DTYPES:
            return no(f"no {context.dtype} activations")
        reason = objection(device.torch_device)
        return no(reason) if reason else YES

    return supports


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] -> a new tensor of its shape and dtype."""
    normed: Tensor = library().llm.functional.rms_norm(x.contiguous(), weight, eps)
    return normed.to(x.dtype)


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device) -> None:
    from octavo_xpu.attention_ipex import IpexAttention

    registry.attention(IpexAttention, priority=PRIORITY)
    registry.op("rms_norm", rms_norm, provider=PROVIDER, priority=PRIORITY, supports=takes(device), graph_safe=False)
