"""FlashInfer with a stand-in for its wrapper: what it is given, in recorded steps too, and when it is not trusted."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("interpreting Triton would hide the card from the other tests", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from octavo.ops.attention import kv_write, paged_attention
from octavo.plugin import AttnBatch, AttnLayer, BatchLimits, KVView
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance import paged
from octavo_cuda import attention_flashinfer
from octavo_cuda.attention_flashinfer import FlashInferAttention, Geometry, num_pages, partial_bytes, plan_bytes

sys.path.insert(0, str(Path(__file__).parent))
from hopper import Hopper, spec

Tensor = torch.Tensor
LIMITS = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=256)
INIT = (
    "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
    "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask "
    "max_total_num_rows"
)
PLAN = (
    "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size "
    "head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left "
    "logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr "
    "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables "
    "max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv uniform_q_len use_token_head_sf"
)
RUN = (
    "q paged_kv_cache args q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl window_left sinks "
    "kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress"
)
"""The parameters of BatchPrefillWithPagedKVCacheWrapper's methods in flashinfer-python 0.7.4."""


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_installed_package_has_the_parameters_that_the_stand_in_checks() -> None:
    wrapper = FlashInferAttention.load()
    for function, known in ((wrapper.__init__, INIT), (wrapper.plan, PLAN), (wrapper.run, RUN)):
        assert set(inspect.signature(function).parameters) >= {"self", *known.split()}


class Wrapper:
    """Computes what FlashInfer's documentation promises, out of the buffers that its kernels would read."""

    off = 0.0
    made: list[Wrapper]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, **options: Any) -> None:
        assert set(options) <= set(INIT.split())
        assert kv_layout == "NHD"
        assert options["backend"] in ("fa2", "fa3")
        assert float_workspace_buffer.dtype == torch.uint8
        self.options = options
        self.recorded = options.get("use_cuda_graph", False)
        self.float_bytes = float_workspace_buffer.numel()
        if self.recorded:
            names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
            self.buffers = [options[name] for name in names]
            assert all(buffer.dtype == torch.int32 for buffer in self.buffers)
            assert len(self.buffers[0]) == len(self.buffers[1]) == len(self.buffers[3]) + 1
        type(self).made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self.ints = int_workspace_buffer
        assert int_workspace_buffer.dtype == torch.uint8

    def plan(self, **given: Any) -> None:
        assert set(given) <= set(PLAN.split())
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        starts, page_starts, pages, last = arrays = [given[name] for name in names]
        assert all(array.dtype == torch.int32 for array in arrays)
        assert len(pages) == page_starts[-1], "as many pages as the starts say"
        assert (starts.diff() >= 0).all()
        assert ((last > 0) == (page_starts.diff() > 0)).all()
        if self.recorded:
            assert len(starts) == len(self.buffers[0]), "the batch size is fixed"
            assert starts[-1] <= self.options["max_total_num_rows"]
            assert len(pages) <= len(self.buffers[2])
            for buffer, array in zip(self.buffers, arrays, strict=True):
                buffer[: len(array)].copy_(array)
        else:
            self.buffers = arrays
        self.rows = int(starts[-1])
        self.given = given

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        given, (starts, page_starts, pages, last) = self.given, self.buffers
        assert q.shape[0] == self.rows, "FlashInfer refuses queries that its plan does not know"
        assert q.dtype == given["q_data_type"]
        size, heads, dim = given["page_size"], given["num_kv_heads"], given["head_dim_qk"]
        assert q.shape[1:] == (given["num_qo_heads"], dim)
        assert given["causal"]
        k, v = cache
        assert k.shape[1:] == v.shape[1:] == (size, heads, dim), "pages are [blocks, tokens, heads, D]"
        assert k.stride() == v.stride()
        for i in range(len(last)):
            first, end = int(starts[i]), int(starts[i + 1])
            row = pages[int(page_starts[i]) : int(page_starts[i + 1])]
            if end > first:
                out[first:end] = paged_attention(
                    q[first:end],
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    row[None],
                    torch.tensor([0, end - first]),
                    ((len(row) - 1) * size + last[i])[None],
                    given["sm_scale"],
                    None if given["window_left"] < 0 else given["window_left"] + 1,
                    given["logits_soft_cap"] or None,
                    None,
                )
                out[first:end] += self.off
        return out


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    stand_in = type("Wrapper", (Wrapper,), {"made": []})
    monkeypatch.setattr(FlashInferAttention, "load", staticmethod(lambda: stand_in))
    monkeypatch.setattr(attention_flashinfer, "load_write", lambda: write)
    return stand_in


def write(k: Tensor, v: Tensor, kv: KVView, slots: Tensor) -> None:
    kv_write(k, v, kv.k, kv.v, slots)


@pytest.mark.parametrize("changes", [{}, {"window": 8}, {"softcap": 20.0}, {"dtype": "float16"}, {"num_heads": 2}])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_it_is_chosen_where_it_agrees_with_plain_attention(
    wrapper: type[Wrapper], changes: dict[str, Any], capability: tuple[int, int]
) -> None:
    kind = spec(**changes, kv_dtype=changes.get("dtype", "bfloat16"))
    assert FlashInferAttention.supports(kind, Hopper(capability)).reason == ""
    assert len(wrapper.made) == 2


def test_it_is_not_chosen_where_it_is_wrong(wrapper: type[Wrapper]) -> None:
    wrapper.off = 0.1
    assert "off by 0.1" in FlashInferAttention.supports(spec(), Hopper()).reason


def test_without_the_package_it_says_so() -> None:
    reason = FlashInferAttention.supports(spec(), Hopper()).reason
    assert reason == "it cannot be loaded: No module named 'flashinfer'" or find_spec("flashinfer")


def test_it_refuses_other_cards_and_kinds(wrapper: type[Wrapper]) -> None:
    refused = {
        "not on 7.5": (spec(), Hopper((7, 5))),
        "not on 0.0": (spec(), TorchDevice("cpu")),
        "no float32": (spec(dtype="float32", kv_dtype="float32"), Hopper()),
        "float8_e4m3fn": (spec(kv_dtype="float8_e4m3fn"), Hopper()),
        "not 80": (spec(head_dim=80), Hopper()),
        "causal": (spec(causal=False), Hopper()),
        "sinks": (spec(sinks=True), Hopper()),
    }
    for reason, (kind, device) in refused.items():
        assert reason in FlashInferAttention.supports(kind, device).reason
    assert not wrapper.made


def test_on_hopper_long_queries_take_the_other_kernel(wrapper: type[Wrapper]) -> None:
    for capability, kernels in (((9, 0), ["fa2", "fa3"]), ((8, 0), ["fa2"])):
        wrapper.made.clear()
        backend = FlashInferAttention(spec(), LIMITS, Hopper(capability))
        layout = backend.kv_layout(paged.kv_spec_of(spec()))
        for new in (64, 65, 64, 65):
            inputs = paged.build(paged.Case(spec=spec(), lens=((3, new),)), layout, Hopper(capability))
            backend.plan(inputs.batch, graph=False)
        assert [made.options["backend"] for made in wrapper.made] == kernels, "one wrapper each, made once"


def pad(case: paged.Case, num_tokens: int, num_seqs: int) -> paged.Case:
    return replace(case, pad_tokens=num_tokens - case.num_tokens, pad_seqs=num_seqs - len(case.lens))


STEPS = {
    "decode": [((37, 1), (5, 1), (130, 1)), ((0, 1),), ((15, 1), (16, 1), (17, 1), (200, 1))],
    "mixed": [((20, 1), (0, 9), (16, 23)), ((0, 40),), ((3, 1),), ((100, 1), (47, 2), (31, 1), (0, 20))],
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_recorded_step_serves_every_step_of_its_shape(wrapper: type[Wrapper], kind: str) -> None:
    device = Hopper()
    num_tokens, num_seqs = (4, 4) if kind == "decode" else (40, 4)
    backend = FlashInferAttention(spec(), LIMITS, device)
    layout = backend.kv_layout(paged.kv_spec_of(spec()))
    static: AttnBatch | None = None
    replay: Callable[[paged.Inputs], Tensor] | None = None
    for lens in STEPS[kind]:
        case = pad(paged.Case(spec=spec(), lens=lens), num_tokens, num_seqs)
        inputs = paged.build(case, layout, device)
        static = recorded(inputs.batch, static, one_each=kind == "decode")
        plan = backend.plan(static, graph=True)
        if replay is None:

            def replay(inputs: paged.Inputs, plan: Any = plan) -> Tensor:
                """Two layers by the plan that was there when they were recorded."""
                for layer in (AttnLayer(index=3), AttnLayer(index=7)):
                    out = torch.full_like(inputs.q, float("nan"))
                    backend.run(layer, inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
                return out

        out = replay(inputs).float()
        assert not out.isnan().any(), "padding tokens have an answer too"
        torch.testing.assert_close(out[: case.num_tokens], paged.dense(case, inputs), atol=2e-2, rtol=0)
    assert len(wrapper.made) == 1


def recorded(batch: AttnBatch, static: AttnBatch | None, *, one_each: bool) -> AttnBatch:
    """The batch in the tensors that the recording knows, with its bounds."""
    if static is None:
        table = torch.zeros((batch.num_seqs, 17), dtype=torch.int32)
        slots = torch.zeros(batch.num_tokens, dtype=torch.int64)
    else:
        table, slots = static.block_table, static.slots
    table.zero_()[:, : batch.block_table.shape[1]] = batch.block_table
    slots.copy_(batch.slots)
    bounds = {"num_decodes": batch.num_seqs if one_each else 0, "max_q_len": 1 if one_each else batch.num_tokens}
    return replace(batch, block_table=table, slots=slots, max_kv_len=256, **bounds)


def test_a_plan_waits_until_the_one_before_has_left_for_the_device(
    wrapper: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Event:
        def record(self, stream: object = None) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

    device = Hopper()
    monkeypatch.setattr(device, "event", Event)
    monkeypatch.setattr(wrapper, "plan", lambda self, **given: log.append("plan"))
    backend = FlashInferAttention(spec(), LIMITS, device)
    inputs = paged.build(
        paged.Case(spec=spec(), lens=((3, 1), (9, 1))), backend.kv_layout(paged.kv_spec_of(spec())), device
    )
    for graph in (False, True):
        log.clear()
        for _ in range(2):
            backend.plan(inputs.batch, graph=graph)
        assert log == ["wait", "plan", "record"] * 2


def test_padding_tokens_are_a_sequence_of_their_own() -> None:
    case = paged.Case(spec=spec(), lens=((15, 1), (0, 17)), pad_tokens=20, pad_seqs=1)
    inputs = paged.build(case, FlashInferAttention.kv_layout(paged.kv_spec_of(spec())), Hopper())
    step = Geometry.of(inputs.batch, 16)
    assert step.q_starts.tolist() == [0, 1, 18, 18, 38]
    assert step.page_starts.tolist() == [0, 1, 3, 3, 5]
    assert step.last_page_lens.tolist() == [16, 1, 0, 4]
    assert step.pages == 5


def test_workspaces_hold_what_a_plan_may_need() -> None:
    kind = spec(num_heads=32, num_kv_heads=8, head_dim=128)
    limits = BatchLimits(max_num_tokens=2048, max_num_seqs=512, max_model_len=4096)
    row, mib = 4 * 32 * 129, 1 << 20  # bytes of a token's answers in all heads
    # Two tiles for each of 132 units by 8 heads; in recorded steps one for each 128 rows of 4 heads, and a rest of each
    # sequence; decode steps have tiles of 16.
    assert partial_bytes(kind, 132, 4, 16) - mib == row * 33 * 128 // 4
    assert partial_bytes(kind, 132, 512, 64) - mib == row * (128 + 513) * 16 // 4, "decode steps need more"
    assert partial_bytes(kind, 132, 512, 2048) - mib == row * (64 + 513) * 128 // 4
    assert plan_bytes(kind, limits) - mib == 4 * 6 * 32 * (16 + 513)
    assert num_pages(kind, limits) == 512 * 257 + 128
