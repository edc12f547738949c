"""AITER, AMD's library of kernels, as a kernel pack: norms and the gated activation, where it is installed and right.

Behind core's Triton kernels until somebody has measured both: `--kernel add_rms_norm=aiter` asks for one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from octavo.plugin import YES, Device, KernelRegistry, OpContext, Support, hookimpl, no

if TYPE_CHECKING:
    from octavo_rocm.aiter_ops import AiterOps

API = "1.0"
PLATFORMS = frozenset({"rocm"})
PROVIDER = "aiter"
PRIORITY = 5
DTYPES = ("bfloat16", "float16")

log = logging.getLogger("octavo.rocm")


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device) -> None:
    from importlib.util import find_spec

    if find_spec("aiter") is None:
        return
    from octavo_rocm.aiter_ops import AiterOps

    try:
        ops = AiterOps()
        reason = ops.self_test(device.torch_device)
    except Exception as error:  # whatever breaks in the other package is a reason to do without it
        reason = f"it cannot be loaded: {(str(error) or type(error).__name__).splitlines()[0]}"
    if reason:
        log.warning("AITER is installed but not used: %s", reason)
        return
    register(registry, ops)


def register(registry: KernelRegistry, ops: AiterOps) -> None:
    common: dict[str, Any] = {"provider": PROVIDER, "priority": PRIORITY}
    registry.op("rms_norm", ops.rms_norm, supports=takes_half, **common)
    registry.op("add_rms_norm", ops.add_rms_norm, supports=takes_half, **common)
    registry.op("act_and_mul", ops.act_and_mul, supports=takes_silu, **common)


def takes_half(context: OpContext) -> Support:
    return YES if context.dtype in DTYPES else no(f"computes {' and '.join(DTYPES)}, not {context.dtype}")


def takes_silu(context: OpContext) -> Support:
    kind = context.params.get("kind")
    return takes_half(context) if kind == "silu" else no(f"computes silu, not {kind}")
