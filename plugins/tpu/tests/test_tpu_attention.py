"""The attention that runs anywhere XLA does against core's reference: on the CPU, and through torch_tpu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, KVView
from octavo.plugin.torch import TorchDevice
from octavo_tpu import attention
from octavo_tpu.attention import MatmulAttention, PallasAttention

LIMITS = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=128)
BLOCK = 16
KINDS: list[dict[str, Any]] = [{}, {"window": 11}, {"softcap": 15.0}, {"window": 40, "softcap": 5.0}]


def make(counts: Sequence[int], contexts: Sequence[int], num_tokens: int, heads: tuple[int, int], dim: int) -> Any:
    """(batch, q, k, v, cache): sequences behind the others are padding; caches hold NaN where nothing was written."""
    generator = torch.Generator().manual_seed(0)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    num_pages = -(-LIMITS.max_model_len // BLOCK)
    table = 1 + torch.randperm(len(counts) * num_pages, generator=generator).view(len(counts), -1).int()
    cache = [torch.randn((len(counts) * num_pages + 1, heads[1], BLOCK, dim), generator=generator) for _ in range(2)]
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    for i, (count, length) in enumerate(zip(counts, contexts, strict=True)):
        at = torch.arange(length - count, length)
        slots[starts[i] : starts[i + 1]] = table[i][at // BLOCK].long() * BLOCK + at % BLOCK
        for page in range(num_pages):
            written = min(max(length - page * BLOCK, 0), BLOCK)
            for one in cache:
                one[table[i, page], :, written:] = torch.nan
    q, k, v = (torch.randn((num_tokens, n, dim), generator=generator) for n in (heads[0], heads[1], heads[1]))
    batch = AttnBatch(
        num_tokens=num_tokens,
        num_seqs=len(counts),
        num_decodes=len(counts) if max(counts) == 1 else 0,
        max_q_len=max(counts),
        max_kv_len=max(contexts),
        q_starts=torch.from_numpy(starts),
        kv_lens=torch.tensor(contexts, dtype=torch.int32),
        block_table=table,
        slots=slots,
        q_starts_host=starts,
        kv_lens_host=np.array(contexts, np.int32),
    )
    return batch, q, k, v, cache


def run(cls: Any, spec: AttentionSpec, made: Any, layer: AttnLayer, place: str, *, graph: bool) -> Any:
    batch, q, k, v, cache = made
    moved = {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in vars(batch).items()}
    kv = KVView(k=cache[0].clone().to(place), v=cache[1].clone().to(place))
    backend = cls(spec, LIMITS, TorchDevice("cpu"))
    plan = backend.plan(AttnBatch(**moved), graph=graph)
    if hasattr(backend, "start_step"):
        backend.start_step(plan)
    out = torch.empty_like(q, device=place)
    backend.run(layer, q.to(place), k.to(place), v.to(place), kv, plan, out)
    return out.cpu(), kv.k.cpu(), kv.v.cpu()


@pytest.mark.parametrize("rounds", ["one round", "a page a round"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("counts", "contexts", "num_tokens"),
    [((1, 1, 1, 0), (1, 30, 100, 0), 4), ((1, 1, 17, 5), (9, 64, 17, 70), 32), ((30, 0), (128, 0), 32)],
)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)], ids=str)
def test_matmul_agrees_with_the_reference(
    place: str,
    counts: tuple[int, ...],
    contexts: tuple[int, ...],
    num_tokens: int,
    heads: tuple[int, int],
    kind: dict[str, Any],
    rounds: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if rounds != "one round":
        monkeypatch.setattr(attention, "ROUND_BYTES", 1)
    dim = 32
    spec = AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        scale=dim**-0.5,
        dtype="float32",
        kv_dtype="float32",
        block_size=BLOCK,
        **kind,
    )
    made = make(counts, contexts, num_tokens, heads, dim)
    real = sum(counts)
    for layer in (AttnLayer(index=0), AttnLayer(index=0, k_scale=0.5, v_scale=2.0)):
        want = run(ReferenceAttention, spec, made, layer, "cpu", graph=False)
        for graph in (False, True):
            got = run(MatmulAttention, spec, made, layer, place, graph=graph)
            torch.testing.assert_close(got[0][:real], want[0][:real], atol=2e-5, rtol=2e-5)
            assert got[0].isfinite().all()
            for mine, theirs in zip(got[1:], want[1:], strict=True):
                # Block 0 is nobody's: any padding token may have written last.
                torch.testing.assert_close(mine[1:], theirs[1:], equal_nan=True)


def test_what_a_backend_cannot_do_is_refused_with_a_reason() -> None:
    base: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "scale": 1.0,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_size": 16,
    }

    class Chip(TorchDevice):
        has_mosaic = True

    chip, host = Chip("cpu"), TorchDevice("cpu")
    assert PallasAttention.supports(AttentionSpec(**base), chip)
    for device, change, why in (
        (host, {}, "not a TPU chip"),
        (chip, {"head_dim": 80}, "multiple of 64"),
        (chip, {"kv_dtype": "float32"}, "over a cache of"),
        (chip, {"sinks": True}, "sinks"),
        (chip, {"causal": False}, "causal"),
    ):
        answer = PallasAttention.supports(AttentionSpec(**(base | change)), device)
        assert not answer.ok
        assert why in answer.reason
    assert MatmulAttention.supports(AttentionSpec(**base), host)
