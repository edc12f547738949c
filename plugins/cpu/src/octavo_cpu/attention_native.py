"""Paged attention by the compiled library: one call a layer, over a work list that all layers of a step share.

Shapes: T tokens, H query heads, Hkv kv heads, D head_dim, B blocks, N tokens of a block.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.plugin import (
    YES,
    AttentionSpec,
    AttnBatch,
    AttnLayer,
    BatchLimits,
    Device,
    KVLayout,
    KVPlan,
    KVSpec,
    KVView,
    Support,
    no,
)
from octavo.plugin.torch import lazy_zeros
from octavo_cpu import native
from octavo_cpu.ops_native import DTYPES, KVStrides, address, strides_of

Tensor = torch.Tensor


class PlanArgs(ctypes.Structure):
    """`octavo::AttentionPlanArgs`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("plan", "q_starts", "kv_lens")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "num_kv_heads", "group", "head_dim", "window", "causal")),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
    )


class AttentionArgs(ctypes.Structure):
    """`octavo::AttentionArgs`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("plan", "q", "k", "v", "k_cache", "v_cache", "out")),
        *((name, ctypes.c_void_p) for name in ("sinks", "k_scales", "v_scales")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        ("kv", KVStrides),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("window", "causal", "dtype")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@cache
def library() -> ctypes.CDLL:
    """The compiled library with what makes plans declared. A plan is no part of a step: it is not recorded."""
    found = native.load()
    found.octavo_attention_plan_new.restype = ctypes.c_void_p
    found.octavo_attention_plan_free.argtypes = [ctypes.c_void_p]
    found.octavo_attention_plan_free.restype = None
    found.octavo_attention_plan.argtypes = [ctypes.c_void_p]
    found.octavo_attention_plan.restype = None
    return found


class Plan:
    """A step's work list in the library's memory. batch: whose tensors its layers read."""

    def __init__(self) -> None:
        self.address: int = library().octavo_attention_plan_new()
        self.batch: AttnBatch | None = None
        weakref.finalize(self, library().octavo_attention_plan_free, self.address).atexit = False


@dataclass(frozen=True, eq=False)
class Bound:
    """One layer's arguments, but for what differs from call to call. kept: whose memory they point into."""

    layer: AttnLayer
    kv: KVView
    args: AttentionArgs
    kept: tuple[Tensor | None, ...]


def interleaved(plan: KVPlan, device: Device) -> list[KVView]:
    """One memory for all layers, block by block.

    The system gives memory when it is first touched. Layers with a memory of their own come to their next page in the
    same step, which then takes a fifth of a second longer.
    """
    spec = plan.spec
    shape = (plan.num_blocks, plan.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.content)
    storage = lazy_zeros(shape, getattr(torch, spec.dtype), device.torch_device)
    return [KVView(k=storage[:, layer, 0], v=storage[:, layer, 1]) for layer in range(plan.num_layers)]


class NativeAttention:
    """`AttentionBackend` of the compiled library. Model dtype in and out; the cache in the same, in float8
    or in int8.

    A sequence's context is cut into pieces of fixed length, which threads take as they come, and added up in order:
    an answer depends neither on the batch around it nor on the number of threads. Scores, softmax and sums are float32
    (Milakov and Gimelshein's online softmax); products are bfloat16 where model and CPU have them.
    """

    name: ClassVar[str] = "cpu_native"
    takes_written_kv: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if device.type != "cpu":
            return no(f"needs a cpu device, not {device.type}")
        if reason := native.why_not():
            return no(reason)
        if spec.dtype not in ("bfloat16", "float16", "float32"):
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype not in (spec.dtype, "float8_e4m3fn", "int8"):
            return no(f"keeps the cache in the model's {spec.dtype}, float8_e4m3fn or int8, not in {spec.kv_dtype}")
        if spec.num_heads % spec.num_kv_heads:
            return no(f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads")
        if spec.window is not None and not spec.causal:
            return no("a sliding window needs causal attention")
        if spec.scale <= 0:
            return no(f"the scale of logits must be positive, not {spec.scale}")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        """A block's tokens of one head lie together: a thread reads one head."""
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BHNC", alloc=interleaved)

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self.spec = spec
        self._attend = native.step_function("attention")
        self._cut = library().octavo_attention_plan
        self._recorded = Plan()
        self._plan_args = PlanArgs(
            num_kv_heads=spec.num_kv_heads,
            group=spec.num_heads // spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            causal=spec.causal,
        )
        self._layers: dict[int, Bound] = {}

    def plan(self, batch: AttnBatch, *, graph: bool) -> Plan:
        """The step's work list. With `graph` always the same one, whose address a recorded step holds."""
        plan = self._recorded if graph else Plan()
        table, slots, args = batch.block_table, batch.slots, self._plan_args
        assert table.stride(1) == 1 or table.shape[1] <= 1, "rows of the block table must be contiguous"
        assert slots.is_contiguous(), "slots must be contiguous"
        q_starts, kv_lens = numbers(batch.q_starts_host), numbers(batch.kv_lens_host)
        args.plan, args.num_seqs = plan.address, batch.num_seqs
        args.q_starts, args.kv_lens = q_starts.ctypes.data, kv_lens.ctypes.data
        args.block_table, args.table_stride, args.slots = table.data_ptr(), table.stride(0), slots.data_ptr()
        plan.batch = batch
        self._cut(ctypes.addressof(args))
        return plan

    def run(
        self,
        layer: AttnLayer,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv: KVView,
        plan: Plan,
        out: Tensor,
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D], or None where the cache holds them. Fills and returns `out`; tokens that
        belong to no sequence become zero."""
        bound = self._layers.get(layer.index)
        if bound is None or bound.kv is not kv or bound.layer is not layer:
            bound = self._layers[layer.index] = self._bind(layer, kv)
        args, q, k, v = bound.args, heads(q), heads(k), heads(v)
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        args.plan, args.num_tokens = plan.address, len(out)
        args.q, args.q_stride, args.out = q.data_ptr(), q.stride(0), target.data_ptr()
        if k is None or v is None:
            args.k = args.v = None
        else:
            args.k, args.k_stride = k.data_ptr(), k.stride(0)
            args.v, args.v_stride = v.data_ptr(), v.stride(0)
        self._attend(args)
        return out if target is out else out.copy_(target)

    def _bind(self, layer: AttnLayer, kv: KVView) -> Bound:
        """Raises ValueError for scales that the cache's numbers have no use for."""
        spec = self.spec
        assert kv.k.stride() == kv.v.stride(), "keys and values must lie alike"
        assert not spec.sinks or layer.sinks is not None, "the spec has sinks, the layer brings none"
        scales = [self._scales(scale) for scale in (layer.k_scale, layer.v_scale)]
        if spec.kv_dtype != "float8_e4m3fn" and any(scale is not None for scale in scales):
            raise ValueError(
                f"layer {layer.index}: k_scale and v_scale are for a float8 cache, not for one in {spec.kv_dtype}"
            )
        sinks = layer.sinks.float().contiguous() if layer.sinks is not None and spec.sinks else None
        args = AttentionArgs(
            k_cache=kv.k.data_ptr(),
            v_cache=kv.v.data_ptr(),
            sinks=address(sinks),
            k_scales=address(scales[0]),
            v_scales=address(scales[1]),
            kv=strides_of(kv.k),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            causal=spec.causal,
            dtype=DTYPES[getattr(torch, spec.dtype)],
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )
        return Bound(layer, kv, args, (sinks, *scales))

    def _scales(self, scale: float | Tensor) -> Tensor | None:
        """float32 [Hkv], or None for a scale of 1."""
        if isinstance(scale, Tensor):
            return scale.float().contiguous()
        return None if scale == 1.0 else torch.full((self.spec.num_kv_heads,), scale)


def numbers(x: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.ascontiguousarray(x, np.int32)


def heads(x: Any) -> Any:
    """x [T, heads, D] with a token's heads side by side; None stays None."""
    if x is None or (x.stride(2) == 1 and x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()
