"""Models over a backend that takes a written cache: the same logits, whoever writes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from octavo.ops.attention import ReferenceAttention, kv_write
from octavo.ops.bind import KernelTable
from octavo.ops.catalogue import reference


class TakesWritten(ReferenceAttention):
    """The reference, which must find its keys and values in the cache."""

    name: ClassVar[str] = "written"
    takes_written_kv: ClassVar[bool] = True

    def run(self, layer: Any, q: Any, k: Any, v: Any, kv: Any, plan: Any, out: Any) -> Any:
        assert k is None
        assert v is None
        blocks, offsets = plan.slots // kv.k.shape[2], plan.slots % kv.k.shape[2]
        return super().run(layer, q, kv.k[blocks, :, offsets], kv.v[blocks, :, offsets], kv, plan, out)


# Gemma has two groups of layers with slots of their own; OLMo norms rows; SmolLM does not rotate every layer.
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "olmo2", "smollm3"])
def test_logits_do_not_depend_on_who_writes(model_type, tiny_folder, paged, prompts):
    folder = tiny_folder(model_type)
    table = KernelTable()
    table.attention(TakesWritten, priority=1)
    got, want = (paged(folder, kernels=kernels).run(prompts) for kernels in (table, None))
    assert {c.provider for c in table.choices if c.what == "attention"} == {"written"}
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_platform_that_overrides_only_the_parts_keeps_them(tiny_folder, paged, prompts):
    calls = []

    def write(*args: Any) -> Any:
        calls.append(len(args))
        return kv_write(*args)

    table = KernelTable()
    table.attention(TakesWritten, priority=1)
    table.op("kv_write", write, provider="parts", priority=1)
    paged(tiny_folder("llama"), kernels=table).run(prompts)
    assert calls
    chosen = {c.what: c.provider for c in table.choices}
    assert (chosen["qkv_norm_rope_write"], chosen["kv_write"]) == ("reference", "parts")


def test_a_platform_that_has_it_in_one_kernel_is_asked_for_the_whole(tiny_folder, paged, prompts):
    table = KernelTable()
    table.attention(TakesWritten, priority=1)
    table.op("qkv_norm_rope_write", reference("qkv_norm_rope_write"), provider="fused", priority=1)
    paged(tiny_folder("llama"), kernels=table).run(prompts)
    assert [c.provider for c in table.choices if c.what == "qkv_norm_rope_write"] == ["fused"]
    assert not [c for c in table.choices if c.what in ("qkv_norm_rope", "kv_write")], "no part is bound for nothing"
