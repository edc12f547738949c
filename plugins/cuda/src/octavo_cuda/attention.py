"""FlashAttention 3 over the paged cache, where its package is installed and works; Triton's kernels serve otherwise.

FlashAttention 3 (Shah et al. 2024) is Hopper's; any package that registers `torch.ops.flash_attn_3` will do. It takes
the pages as they lie, any size of them, for prompts and for decoding, and its launches depend on bounds alone, so it
can be recorded. Before it is chosen for a kind of layer, it must agree with plain attention on a small batch of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
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
from octavo_cuda.attention_check import objection

Tensor = torch.Tensor

MODULE = "flash_attn_3._C"
HOPPER = 9


@dataclass(frozen=True, kw_only=True)
class Fa3Plan:
    """One step for all layers, by reference. one_each: token i belongs to sequence i, so that no starts are needed.

    clear: there may be padding tokens, which the operator leaves as they are and which must not become NaN.
    """

    one_each: bool
    clear: bool
    max_q_len: int
    q_starts: Tensor
    kv_lens: Tensor
    block_table: Tensor
    slots: Tensor


class Fa3Attention:
    """Implements `octavo.plugin.AttentionBackend`."""

    name: ClassVar[str] = "fa3"
    takes_written_kv: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        major, minor = getattr(device, "capability", (0, 0))
        if major != HOPPER:
            return no(f"runs on Hopper (compute capability 9.0) only, not on {major}.{minor}")
        if spec.dtype not in ("bfloat16", "float16"):
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype != spec.dtype:
            return no(f"a cache in {spec.kv_dtype} needs queries in it too, and reads slower than Triton's kernel")
        if not spec.causal:
            return no("only causal attention is implemented")
        if spec.head_dim & (spec.head_dim - 1):
            return no(f"keys and values are written in heads whose size is a power of two, not {spec.head_dim}")
        reason = objection(cls, spec, device)  # type: ignore[arg-type]
        return no(reason) if reason else YES

    @staticmethod
    def load() -> Any:
        """The packet of the forward operator. Raises ImportError or AttributeError if there is none."""
        import_module(MODULE)
        return torch.ops.flash_attn_3.fwd.default

    @staticmethod
    def version() -> str:
        """What tells one build from another: packages of several names bring the module."""
        file = getattr(import_module(MODULE), "__file__", None)
        return f"{Path(file).stat().st_size} bytes" if file else "unknown"

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BHNC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self._forward = self.load()
        self._write = load_write()
        self._options: dict[str, Any] = {"softmax_scale": spec.scale, "is_causal": True}
        if spec.window is not None:
            self._options |= {"window_size_left": spec.window - 1, "window_size_right": 0}
        if spec.softcap is not None:
            self._options["softcap"] = spec.softcap

    def plan(self, batch: AttnBatch, *, graph: bool) -> Fa3Plan:
        """References and bounds only: the operator plans on the device, inside each recorded call."""
        one_each = batch.max_q_len == 1 and batch.num_tokens == batch.num_seqs
        return Fa3Plan(
            one_each=one_each,
            # Padding sequences of a decode step have no context, for which the operator writes zeros.
            clear=not one_each and (graph or int(batch.q_starts_host[-1]) < batch.num_tokens),
            max_q_len=batch.max_q_len,
            q_starts=batch.q_starts,
            kv_lens=batch.kv_lens,
            block_table=batch.block_table,
            slots=batch.slots,
        )

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KVView, plan: Fa3Plan, out: Tensor
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`; padding tokens become zero."""
        if k is not None and v is not None:
            self._write(k, v, kv, plan.slots)
        options = self._options if layer.sinks is None else self._options | {"sinks": layer.sinks}
        # The operator's caches are [blocks, tokens of a block, heads, D].
        pages = {"k": kv.k.transpose(1, 2), "v": kv.v.transpose(1, 2), "page_table": plan.block_table}
        if plan.one_each:
            self._forward(q=q[:, None], out=out[:, None], seqused_k=plan.kv_lens, **pages, **options)
        else:
            if plan.clear:
                out.zero_()
            self._forward(
                q=q,
                out=out,
                cu_seqlens_q=plan.q_starts,
                max_seqlen_q=plan.max_q_len,
                seqused_k=plan.kv_lens,
                **pages,
                **options,
            )
        return out


def load_write() -> Callable[[Tensor, Tensor, KVView, Tensor], None]:
    """(k, v, cache, slots): one launch that writes both. Triton is imported only by those who use it."""
    from octavo.triton.attention_write import kv_write

    return kv_write
