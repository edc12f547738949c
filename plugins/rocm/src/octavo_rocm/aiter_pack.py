"""AITER, AMD's library of kernels, as a kernel pack: norms and the gated activation, where it is installed and right.

Behind core's Triton kernels until somebody has measured both: `--kernel add_rms_norm=aiter` asks for one. Only then is
the package imported, which compiles its kernels at their first call, and tested.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from octavo.plugin import YES, Device, KernelRegistry, OpContext, Support, hookimpl, no

API = "1.0"
PLATFORMS = frozenset({"rocm"})
PROVIDER = "aiter"
PRIORITY = 5
DTYPES = ("bfloat16", "float16")


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device) -> None:
    if find_spec("aiter") is None:
        return
    from octavo_rocm import aiter_ops

    for name in ("rms_norm", "add_rms_norm", "act_and_mul"):
        op = getattr(aiter_ops, name)
        registry.op(name, op, provider=PROVIDER, priority=PRIORITY, supports=takes(device))


def takes(device: Device) -> Callable[[OpContext], Support]:
    """The `supports` of the ops, for one device."""

    def supports(context: OpContext) -> Support:
        from octavo_rocm.aiter_ops import objection

        if context.dtype not in DTYPES:
            return no(f"computes {' and '.join(DTYPES)}, not {context.dtype}")
        kind = context.params.get("kind")
        if context.op == "act_and_mul" and kind != "silu":
            return no(f"computes silu, not {kind}")
        reason = objection(device.torch_device)
        return no(reason) if reason else YES

    return supports
