"""Several backends, one step: each sequence is served once, by the backend of its phase, whatever the mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.attention import ReferenceAttention, kv_write
from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchKey, BatchLimits, KVLayout, KVView, Support, no
from octavo.plugin.recording import recorded_shapes
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance import paged
from octavo_cuda import attention_phases
from octavo_cuda.attention_choice import Choice, Phase
from octavo_cuda.attention_phases import AutoAttention, phase_of

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, dtype="float32", kv_dtype="float32", block_size=16
)
LIMITS = BatchLimits(max_num_tokens=128, max_num_seqs=16, max_model_len=512)


class Counting(ReferenceAttention):
    """The reference, noting the query lengths it was given."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: list[int] = []

    def plan(self, batch: AttnBatch, *, graph: bool) -> Any:
        lengths = (batch.q_starts_host[1:] - batch.q_starts_host[:-1]).tolist()
        self.seen += [n for n in lengths if n]
        return super().plan(batch, graph=graph)

    def run(self, layer: AttnLayer, q: Any, k: Any, v: Any, kv: KVView, plan: Any, out: Any) -> Any:
        if k is None:  # it writes again what lies there
            blocks, offsets = plan.slots // SPEC.block_size, plan.slots % SPEC.block_size
            k, v = kv.k[blocks, :, offsets], kv.v[blocks, :, offsets]
        return super().run(layer, q, k, v, kv, plan, out)


class Few(Counting):
    name = "few"


class Many(Counting):
    name = "many"


class Long(Counting):
    name = "long"


class Mixed(Counting):
    name = "mixed"


BEST: dict[Phase, type[Counting]] = {"few decodes": Few, "many decodes": Many, "long prompts": Long, "mixed": Mixed}


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> type[AutoAttention]:
    monkeypatch.setattr(attention_phases, "LONG_TOKENS", 20)
    monkeypatch.setattr(attention_phases, "FEW_DECODES", 4)
    monkeypatch.setattr(attention_phases, "choose", lambda *arguments: Choice(best=BEST, why="measured"))
    return AutoAttention.of(*BEST.values())


def serve(
    auto: type[AutoAttention], lens: tuple[tuple[int, int], ...], *, padding: tuple[int, int] = (0, 0), written: bool
) -> dict[str, list[int]]:
    """The query lengths that each backend got, once the answer is seen to be right."""
    device = TorchDevice("cpu")
    case = paged.Case(spec=SPEC, lens=lens, pad_tokens=padding[0], pad_seqs=padding[1])
    inputs = paged.build(case, KVLayout(block_size=SPEC.block_size, dtype=SPEC.kv_dtype), device)
    backend = auto(SPEC, LIMITS, device)
    plan = backend.plan(inputs.batch, graph=False)
    out = torch.zeros_like(inputs.q)
    new: tuple[Any, Any] = (inputs.k, inputs.v)
    if written:
        kv_write(inputs.k, inputs.v, inputs.kv.k, inputs.kv.v, inputs.batch.slots)
        new = (None, None)
    backend.run(AttnLayer(index=0), inputs.q, *new, inputs.kv, plan, out.zero_())
    expected = paged.dense(case, inputs)
    torch.testing.assert_close(out[: len(expected)], expected, atol=1e-5, rtol=1e-5)
    return {each.name: each.seen for each in backend._backends.values() if each.seen}


@pytest.mark.parametrize(
    ("lens", "seen"),
    [
        (((40, 1), (3, 1), (200, 1)), {"few": [1, 1, 1]}),
        (((40, 1), (3, 1), (200, 1), (9, 1), (2, 1)), {"many": [1] * 5}),
        (((0, 30), (17, 9)), {"long": [30, 9]}),
        (((40, 1), (3, 1), (0, 30), (17, 9)), {"many": [1, 1], "long": [30, 9]}),
        (((40, 1), (3, 1), (0, 10), (17, 9)), {"mixed": [1, 1, 10, 9]}),
    ],
    ids=["few decodes", "many decodes", "prompts", "mixed", "short prompts"],
)
@pytest.mark.parametrize("padding", [(0, 0), (5, 2)])
def test_each_sequence_goes_to_the_backend_of_its_phase(
    auto: type[AutoAttention],
    lens: tuple[tuple[int, int], ...],
    seen: dict[str, list[int]],
    padding: tuple[int, int],
) -> None:
    if "few" in seen and padding[1]:
        seen = {"many": seen["few"]}  # padding sequences count: a recorded shape knows no others
    assert serve(auto, lens, padding=padding, written=False) == seen


def test_a_step_is_not_parted_if_one_backend_serves_both_parts(
    auto: type[AutoAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = BEST | {"many decodes": Long}
    monkeypatch.setattr(attention_phases, "choose", lambda *arguments: Choice(best=same, why="measured"))
    assert serve(auto, ((40, 1), (0, 30)), written=False) == {"long": [1, 30]}


def test_keys_and_values_may_lie_in_the_cache_already(auto: type[AutoAttention]) -> None:
    assert serve(auto, ((40, 1), (3, 1), (0, 30)), written=True) == {"many": [1, 1], "long": [30]}


def test_only_backends_that_all_take_written_keys_take_them_together() -> None:
    class Takes(Able):
        takes_written_kv = True

    assert AutoAttention.of(Takes, Takes).takes_written_kv
    assert not AutoAttention.of(Takes, Able).takes_written_kv


def bounds(key: BatchKey) -> AttnBatch:
    """What a backend sees of a recorded shape."""
    nothing: Any = None
    return AttnBatch(
        num_tokens=key.num_tokens,
        num_seqs=key.num_seqs,
        num_decodes=key.num_seqs if key.max_q_len == 1 else 0,
        max_q_len=key.max_q_len or key.num_tokens,
        max_kv_len=4096,
        q_starts=nothing,
        kv_lens=nothing,
        block_table=nothing,
        slots=nothing,
        q_starts_host=nothing,
        kv_lens_host=nothing,
    )


def test_every_recorded_shape_has_one_phase_and_few_long_prompts_have_shapes() -> None:
    keys = recorded_shapes(BatchLimits(max_num_tokens=2048, max_num_seqs=512, max_model_len=4096))
    phases = {key: phase_of(bounds(key), graph=True) for key in keys}
    assert {key.num_seqs for key, phase in phases.items() if phase == "few decodes"} == {1, 2, 4, 8, 16}
    long_prompts = {key.num_tokens for key, phase in phases.items() if phase == "long prompts"}
    assert long_prompts == set(range(1024, 2049, 128))
    assert {key.num_seqs for key, phase in phases.items() if phase == "long prompts"} == {4}
    assert set(phases.values()) == set(BEST)


class Able(Counting):
    name = "able"

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Any) -> Support:
        return Support(ok=True)


class Unable(Able):
    name = "unable"

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Any) -> Support:
        return no("not today")


def test_with_one_able_backend_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TorchDevice("cpu")
    assert AutoAttention.of(Unable, Able).supports(SPEC, device).reason == (
        "there is no choice: able alone takes layers of this kind"
    )
    assert "no backend alone" in AutoAttention.of(Unable).supports(SPEC, device).reason
    assert AutoAttention.of(Able, Few).supports(SPEC, device).ok
    asked: list[Any] = []

    def choose(classes: Any, *arguments: Any) -> Choice:
        asked.extend(classes)
        return Choice(best=dict.fromkeys(BEST, Able), why="it is the faster one")

    monkeypatch.setattr(attention_phases, "choose", choose)
    made = AutoAttention.of(Unable, Able, Few)(SPEC, LIMITS, device)
    assert asked == [Able, Few], "only backends that take the layers are measured"
    assert made.why == "it is the faster one"
