"""Two backends, one step: each sequence is served once, by the right one, whatever the mix."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, KVLayout
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance import paged
from octavo_cuda import attention_phases
from octavo_cuda.attention_phases import PhaseAttention

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, dtype="float32", kv_dtype="float32", block_size=16
)
LIMITS = BatchLimits(max_num_tokens=128, max_num_seqs=16, max_model_len=512)


class Counting(ReferenceAttention):
    """The reference, noting the query lengths it was given."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: list[int] = []

    def plan(self, batch, *, graph):  # type: ignore[no-untyped-def]
        lengths = (batch.q_starts_host[1:] - batch.q_starts_host[:-1]).tolist()
        self.seen += [n for n in lengths if n]
        return super().plan(batch, graph=graph)


@pytest.mark.parametrize(
    ("lens", "triton", "fa3"),
    [
        (((40, 1), (3, 1), (200, 1)), [1, 1, 1], []),
        (((0, 30), (17, 9)), [], [30, 9]),
        (((40, 1), (3, 1), (0, 30), (17, 9)), [1, 1], [30, 9]),
        (((40, 1), (3, 1), (0, 10), (17, 9)), [1, 1, 10, 9], []),
    ],
    ids=["decodes", "prompts", "mixed", "short prompts"],
)
@pytest.mark.parametrize("padding", [(0, 0), (5, 2)])
def test_each_sequence_goes_to_the_backend_of_its_phase(
    lens: tuple[tuple[int, int], ...],
    triton: list[int],
    fa3: list[int],
    padding: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_phases, "Fa3Attention", Counting)
    monkeypatch.setattr(attention_phases, "LONG", 20)
    device = TorchDevice("cpu")
    case = paged.Case(spec=SPEC, lens=lens, pad_tokens=padding[0], pad_seqs=padding[1])
    layout = KVLayout(block_size=SPEC.block_size, dtype=SPEC.kv_dtype)
    inputs = paged.build(case, layout, device)
    backend = PhaseAttention.with_triton(Counting)(SPEC, LIMITS, device)
    plan = backend.plan(inputs.batch, graph=False)
    out = torch.zeros_like(inputs.q)
    backend.run(AttnLayer(index=0), inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
    expected = paged.dense(case, inputs)
    torch.testing.assert_close(out[: len(expected)], expected, atol=1e-5, rtol=1e-5)
    assert (backend._triton.seen, backend._fa3.seen) == (triton, fa3)
