"""FlashAttention 2 of `vllm-xpu-kernels` (0.1.15.1) over the paged cache: one operator for prompts and decoding.

The operator reads pages as they lie, [blocks, tokens of a block, heads, D], and its launches depend on bounds alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from octavo.plugin import (
    YES,
    AttentionSpec,
    AttnBatch,
    AttnLayer,
    BatchLimits,
    Device,
    KVLayout,
    KVSpec,
    KVView,
    Support,
    no,
)
from octavo_xpu.device import SyclDevice
from octavo_xpu.small import SmallOps

Tensor = torch.Tensor

PACKAGE = "vllm_xpu_kernels"
MODULE = f"{PACKAGE}._vllm_fa2_C"
DTYPES = ("bfloat16", "float16")
COMPILED = {
    (8, 64): ((16, 64), ()),
    (8, 128): ((16, 32, 64), (16, 64)),
    (8, 256): ((64,), ()),
    (16, 64): ((16, 32, 64), ()),
    (16, 128): ((16, 64), (16,)),
}
"""What its wheel holds of the kernels that its source would give; the operator raises at the first step without one.
(query heads of a KV head that decoding takes at once, head size): pages without a window, pages with one."""
PAGES = {16: "16", 32: "32", 64: "multiples of 64"}
"""Tokens that its kernels read of a page at once -> the pages that they take."""
UNBOUNDED = -1


@dataclass(frozen=True, kw_only=True)
class VllmXpuPlan:
    """tables: its rows side by side, as the operator reads them; filled by `start_step` where the batch's are not.
    clear: whether there may be padding tokens. longest: a bound of the contexts."""

    batch: AttnBatch
    tables: Tensor
    clear: bool
    longest: int


class VllmXpuAttention:
    """Implements `octavo.plugin.AttentionBackend`."""

    name: ClassVar[str] = "vllm_xpu"
    takes_written_kv: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if find_spec(PACKAGE) is None:
            return no("the package vllm-xpu-kernels is not installed")
        if not isinstance(device, SyclDevice):
            return no(f"needs a device with a SYCL runtime, not {device.type}")
        if spec.dtype not in DTYPES:
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype != spec.dtype:
            return no(f"reads a cache in the activations' dtype, not in {spec.kv_dtype}")
        if not spec.causal:
            return no("only causal attention is implemented")
        if spec.softcap:
            return no("its operator takes a softcap, but hands it to no kernel")
        if spec.sinks:
            return no("the dtype in which it takes sinks is not known here")
        group = spec.num_heads // spec.num_kv_heads
        pages = COMPILED.get((8 if group <= 8 else 16, spec.head_dim), ((), ()))[spec.window is not None]
        what = f"heads of {spec.head_dim} in groups of {group}{'' if spec.window is None else ' with a window'}"
        if not pages:
            return no(f"its wheel has no kernel for {what}")
        if (64 if spec.block_size % 64 == 0 else spec.block_size) not in pages:
            return no(f"pages of {' or '.join(PAGES[page] for page in pages)} tokens for {what}, not {spec.block_size}")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BNHC")

    @staticmethod
    def load() -> Any:
        """The operator. Raises ImportError or AttributeError if it is not there."""
        import_module(MODULE)
        return torch.ops._vllm_fa2_C.varlen_fwd.default

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        assert isinstance(device, SyclDevice)
        self._forward = self.load()
        self._small = SmallOps(device.runtime)
        self._limits = limits
        left = UNBOUNDED if spec.window is None else spec.window - 1
        self._options: dict[str, Any] = {
            "leftpad_k": None,
            "alibi_slopes": None,
            "p_dropout": 0.0,
            "q_scale": None,
            "k_scale": None,
            "v_scale": None,
            "softmax_scale": spec.scale,
            "softmax_sink": None,
            "zero_tensors": False,
            "window_size_left": left,
            "window_size_right": UNBOUNDED if spec.window is None else 0,
            "softcap": 0.0,
            "return_softmax": False,
            "gen": None,
            "num_splits": None,
            "splits_per_seq": None,
            "work_list": None,
        }

    def plan(self, batch: AttnBatch, *, graph: bool) -> VllmXpuPlan:
        """References and bounds."""
        table = batch.block_table
        return VllmXpuPlan(
            batch=batch,
            tables=table if table.is_contiguous() else torch.empty(table.shape, dtype=table.dtype, device=table.device),
            clear=graph or int(batch.q_starts_host[-1]) < batch.num_tokens,
            longest=self._limits.max_model_len if graph else batch.max_kv_len,
        )

    def start_step(self, plan: VllmXpuPlan) -> None:
        if plan.tables is not plan.batch.block_table:
            plan.tables.copy_(plan.batch.block_table)

    def run(
        self,
        layer: AttnLayer,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv: KVView,
        plan: VllmXpuPlan,
        out: Tensor,
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`; padding tokens become zero."""
        batch = plan.batch
        if k is not None and v is not None:
            self._small.write(k, v, kv.k, kv.v, batch.slots, layer.k_scale, layer.v_scale)
        if plan.clear:
            out.zero_()
        decode = batch.max_q_len == 1
        self._forward(
            q=q,
            k=kv.k.transpose(1, 2),
            v=kv.v.transpose(1, 2),
            out=out,
            cu_seqlens_q=batch.q_starts,
            cu_seqlens_k=torch.zeros_like(batch.q_starts),  # unread where there are pages
            seqused_k=batch.kv_lens,
            block_table=plan.tables,
            max_seqlen_q=batch.max_q_len,
            max_seqlen_k=plan.longest,
            is_causal=not decode,  # one query sees its whole context
            mix_batch=not decode,
            **self._options,
        )
        return out
