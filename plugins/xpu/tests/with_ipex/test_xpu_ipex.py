"""The pack over `intel-extension-for-pytorch` on that package's CPU build, against core's references.

It needs torch 2.8, so an environment of its own: `make test-xpu-ipex`. Without the package the tests fail.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.ops.bind import KernelTable
from octavo.ops.catalogue import CATALOGUE, DEFAULT_TOLERANCE
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, OpContext
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance.paged import Case, Inputs, build, dense, kv_spec_of
from octavo_xpu import attention_ipex, ipex_kernels
from octavo_xpu.attention_ipex import IpexAttention

HOST = TorchDevice("cpu")
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=16, max_model_len=1024)
ALLOWED = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
DECODES = ((0, 1), (17, 1), (300, 1))
MIXED = ((5, 1), (40, 1), (0, 23), (31, 9))


def spec(dtype: str, **more: Any) -> AttentionSpec:
    facts: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scale": 0.125, "block_size": 16}
    return AttentionSpec(**facts | {"dtype": dtype, "kv_dtype": dtype} | more)


@pytest.fixture
def forgotten() -> Any:
    """What the pack remembers of a device is asked anew, before and after."""
    remembered = (ipex_kernels.library, ipex_kernels.objection, attention_ipex.attention_objection)
    for fn in remembered:
        fn.cache_clear()
    yield
    for fn in remembered:
        fn.cache_clear()


def test_the_package_loads_and_passes_its_test() -> None:
    assert ipex_kernels.objection(HOST.torch_device) == ""
    assert attention_ipex.attention_objection(HOST.torch_device) == ""


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("padding", [0, 2])
def test_attention_gives_what_dense_attention_gives(dtype: str, lens: Any, padding: int) -> None:
    check(spec(dtype), lens, padding)


@pytest.mark.parametrize("kind", [{"num_heads": 8, "head_dim": 128}, {"block_size": 32}], ids=str)
def test_other_heads_and_blocks(kind: dict[str, Any]) -> None:
    check(spec("bfloat16", **kind), MIXED, 0)
    check(spec("bfloat16", **kind), DECODES, 0)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("kind", [{"window": 8}, {"softcap": 3.0}, {"window": 8, "softcap": 3.0}], ids=str)
def test_windows_and_softcaps(dtype: str, kind: dict[str, Any]) -> None:
    check(spec(dtype, **kind), MIXED, 2)
    check(spec(dtype, **kind), DECODES, 0)


def test_tables_that_are_a_part_of_wider_ones_are_read_row_by_row() -> None:
    of = spec("float32")
    case = Case(spec=of, lens=DECODES)
    inputs = build(case, IpexAttention.kv_layout(kv_spec_of(of)), HOST)
    assert not inputs.batch.block_table.is_contiguous()
    plan = IpexAttention(of, LIMITS, HOST).plan(inputs.batch, graph=False)
    assert error_of(case, inputs, plan) <= ALLOWED["float32"]
    as_it_lies = replace(plan, tables=inputs.batch.block_table[: plan.num_seqs])
    assert error_of(case, inputs, as_it_lies) > 0.1, "the operator reads strides now: need the plan copy tables?"


def check(of: AttentionSpec, lens: Any, padding: int) -> None:
    assert IpexAttention.supports(of, HOST).ok
    case = Case(spec=of, lens=lens, pad_tokens=padding, pad_seqs=padding)
    inputs = build(case, IpexAttention.kv_layout(kv_spec_of(of)), HOST)
    error = error_of(case, inputs, IpexAttention(of, LIMITS, HOST).plan(inputs.batch, graph=False))
    assert error <= ALLOWED[of.dtype], f"{error:.2e}"


def error_of(case: Case, inputs: Inputs, plan: attention_ipex.IpexPlan) -> float:
    """Largest error, as a share of the largest number; padding tokens are checked to be zero."""
    out = torch.full_like(inputs.q, float("nan"))
    backend = IpexAttention(case.spec, LIMITS, HOST)
    found = backend.run(AttnLayer(index=0), inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
    assert (found[case.num_tokens :] == 0).all()
    expected = dense(case, inputs)
    return float((found[: case.num_tokens].float() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", ALLOWED)
def test_its_norm_gives_what_the_reference_gives(dtype: str) -> None:
    name, table = "rms_norm", KernelTable()
    ipex_kernels.register_kernels(table, HOST)
    [kernel] = table.providers(name)
    assert kernel.supports(OpContext(op=name, dtype=dtype, device_type="cpu")).ok
    exact = KernelTable().bind(name, dtype="float32", device=HOST)
    allowed = CATALOGUE[name].tolerance.get(dtype, DEFAULT_TOLERANCE[dtype])
    for sample in CATALOGUE[name].samples(dtype):
        wide = (x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in sample)
        torch.testing.assert_close(kernel.fn(*sample).float(), exact(*wide), rtol=allowed, atol=allowed)


def test_a_wrong_result_at_load_is_refused_by_name(forgotten: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = ipex_kernels.library().llm.modules.PagedAttention
    right = paged.flash_attn_varlen_func

    def wrong(out: torch.Tensor, *rest: Any, **more: Any) -> None:
        right(out, *rest, **more)
        out[0, 0, 0] += 1.0

    monkeypatch.setattr(paged, "flash_attn_varlen_func", wrong)
    answer = IpexAttention.supports(spec("bfloat16"), HOST)
    assert not answer.ok
    assert "flash_attn_varlen_func of intel-extension-for-pytorch is wrong in bfloat16" in answer.reason


@pytest.mark.parametrize(
    ("changes", "argument", "ignored"), [({"window": 8}, 12, -1), ({"softcap": 30.0}, "softcap", -1.0)], ids=str
)
def test_a_build_that_ignores_windows_or_softcaps_is_refused_for_models_that_have_them(
    forgotten: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], argument: int | str, ignored: float
) -> None:
    paged = ipex_kernels.library().llm.modules.PagedAttention
    right = paged.flash_attn_varlen_func

    def partial(*args: Any, **more: Any) -> None:
        if isinstance(argument, int):
            args = (*args[:argument], ignored, *args[argument + 1 :])
        else:
            more[argument] = ignored
        right(*args, **more)

    monkeypatch.setattr(paged, "flash_attn_varlen_func", partial)
    answer = IpexAttention.supports(spec("bfloat16", **changes), HOST)
    assert not answer.ok
    assert f"with a {next(iter(changes))} of intel-extension-for-pytorch is wrong" in answer.reason
    assert IpexAttention.supports(spec("bfloat16"), HOST).ok


def test_an_operator_that_raises_is_refused_by_name(forgotten: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise OSError("no such driver")

    monkeypatch.setattr(ipex_kernels.library().llm.functional, "rms_norm", broken)
    answer = IpexAttention.supports(spec("bfloat16"), HOST)
    assert "OSError: no such driver" in answer.reason


def test_refusals_say_why() -> None:
    for changes, word in (({"kv_dtype": "int8"}, "int8"), ({"causal": False}, "causal"), ({"sinks": True}, "sinks")):
        answer = IpexAttention.supports(spec("bfloat16", **changes), HOST)
        assert not answer.ok
        assert word in answer.reason
    assert "multiples of 16" in IpexAttention.supports(spec("bfloat16", block_size=8), HOST).reason
    assert "float64" in ipex_kernels.takes(HOST)(SimpleNamespace(dtype="float64")).reason
