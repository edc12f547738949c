"""Core's portable kernels through Triton's compiler for Intel GPUs: run on Intel's CPU device, against the references.

Matrix units (`dpas`) cannot run there: with them the kernels are compiled down to SPIR-V and looked at.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.bind import KernelTable
from octavo.ops.catalogue import CATALOGUE, DEFAULT_TOLERANCE
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, DeviceDesc, LinearSpec, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance.paged import Case, build, dense, kv_spec_of
from octavo_xpu import triton_kernels


class Host(TorchDevice):
    """The CPU, with as many compute units as an Arc A770 has Xe cores."""

    units = 32

    def describe(self) -> DeviceDesc:
        return DeviceDesc(name="host", compute_units=self.units)


HOST = Host("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=16, max_model_len=1024)
ALLOWED = {"float16": 2e-3, "bfloat16": 1e-2}
OPS = (
    "rms_norm",
    "add_rms_norm",
    "rope",
    "qkv_norm_rope",
    "act_and_mul",
    "begin_step",
    "commit_tokens",
    "greedy",
    "sample",
    "penalties",
    "min_p",
    "apply_bitmask",
    "topk_topp",
)


def registered() -> KernelTable:
    table = KernelTable()
    triton_kernels.register(table)
    return table


def provider(name: str) -> Any:
    [found] = registered().providers(name)
    return found.fn


def copied(sample: tuple[Any, ...], dtype: torch.dtype | None = None) -> list[Any]:
    """The sample in other memory. dtype: of its floating-point tensors of 16 bits, if other."""

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wide = dtype is not None and value.is_floating_point() and value.element_size() == 2
        return value.to(dtype) if wide else value.clone(memory_format=torch.preserve_format)

    return [one(value) for value in sample]


def tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_its_reference_gives(on_cpu: Any, name: str) -> None:
    fn, dtype = provider(name), "bfloat16"
    exact = KernelTable().bind(name, dtype="float32", device=HOST)
    allowed = CATALOGUE[name].tolerance.get(dtype, DEFAULT_TOLERANCE[dtype])
    for sample in CATALOGUE[name].samples(dtype):
        expected = tensors(exact(*copied(sample, torch.float32)))
        found = tensors(fn(*copied(sample)))
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=allowed, atol=allowed)
    assert on_cpu.num_launched, "nothing ran"


def spec(dtype: str, **more: Any) -> AttentionSpec:
    facts: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 32, "scale": 0.2, "block_size": 16}
    return AttentionSpec(**facts | {"dtype": dtype, "kv_dtype": dtype} | more)


def attend(of: AttentionSpec, lens: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The answers of Triton's kernels and of dense attention."""
    cls = triton_kernels.attention()
    case = Case(spec=of, lens=lens, pad_tokens=2, pad_seqs=1)
    inputs = build(case, cls.kv_layout(kv_spec_of(of)), HOST)
    backend = cls(of, LIMITS, HOST)
    plan = backend.plan(inputs.batch, graph=False)
    backend.start_step(plan)
    layer = AttnLayer(index=0, sinks=inputs.sinks)
    out = torch.full_like(inputs.q, float("nan"))
    found = backend.run(layer, inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
    assert (found[case.num_tokens :] == 0).all(), "padding tokens are zero"
    return found[: case.num_tokens].float(), dense(case, inputs)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("kind", [{}, {"window": 20, "softcap": 30.0}], ids=["plain", "window and softcap"])
def test_decoding_gives_what_dense_attention_gives(on_cpu: Any, dtype: str, kind: dict[str, Any]) -> None:
    found, expected = attend(spec(dtype, **kind), [(0, 1), (17, 1), (300, 1)])
    assert (found - expected).abs().max() <= ALLOWED[dtype] * expected.abs().max()
    assert {"deal_kernel", "decode_kernel", "kv_write_kernel"} <= on_cpu.num_launched.keys()


def test_prompts_give_what_dense_attention_gives(on_cpu: Any) -> None:
    found, expected = attend(spec("bfloat16"), [(5, 1), (0, 40), (31, 9)])
    assert (found - expected).abs().max() <= ALLOWED["bfloat16"] * expected.abs().max()
    assert {"decode_kernel", "prefill_kernel"} <= on_cpu.num_launched.keys()


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "float16"), (1, "bfloat16"), (3, "bfloat16"), (8, "float16")])
def test_a_product_of_few_tokens_is_right(on_cpu: Any, dtype: str, tokens: int) -> None:
    product(dtype, tokens)
    assert on_cpu.num_launched == {"_gemv_kernel": 1}


def product(dtype: str, tokens: int, *, runs: bool = True) -> None:
    n, k = 80, 320
    of = LinearSpec(in_features=k, out_features=n, act_dtype=dtype, out_dtype=dtype)
    generator = torch.Generator().manual_seed(tokens)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(getattr(torch, dtype)) for shape in ((tokens, k), (n, k), (n,))
    )
    kernel = triton_kernels.TritonLinear()
    found = kernel.apply(x, kernel.prepare({"weight": weight}, of, HOST), bias).float()
    expected = F.linear(x.float(), weight.float(), bias.float())
    assert not runs or (found - expected).abs().max() <= ALLOWED[dtype] * expected.abs().max()


def test_many_tokens_are_left_to_torch(on_cpu: Any) -> None:
    product("bfloat16", triton_kernels.MOST_TOKENS + 1)
    assert not on_cpu.num_launched


def test_launches_are_cut_for_the_xe_cores_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    of = LinearSpec(in_features=4096, out_features=4096, act_dtype="float16", out_dtype="float16")
    cls = triton_kernels.attention()
    small = triton_kernels.TritonLinear.cuts(of, HOST), cls(spec("float16"), LIMITS, HOST)._num_units
    monkeypatch.setattr(HOST, "units", 448)
    large = triton_kernels.TritonLinear.cuts(of, HOST), cls(spec("float16"), LIMITS, HOST)._num_units
    assert small[0] != large[0]
    assert (small[1], large[1]) == (32, 448)


def test_every_kernel_compiles_for_a_gpu(for_gpu: Any) -> None:
    """The launches are those of a GPU, over the host's memory, and nothing runs."""
    table = registered()
    for name, op in CATALOGUE.items():
        for kernel in table.providers(name):
            for sample in op.samples("bfloat16"):
                kernel.fn(*copied(sample))
    for lens in ([(0, 1), (300, 1)], [(0, 40), (31, 9)]):
        with pytest.raises(AssertionError):  # nothing was written, and the padding tells
            attend(spec("bfloat16"), lens)
    product("bfloat16", 1, runs=False)
    product("bfloat16", 8, runs=False)
    expected = {
        "_rms_norm_kernel",
        "_rope_kernel",
        "decode_kernel",
        "prefill_kernel",
        "_gemv_kernel",
        "_topk_topp_kernel",
    }
    assert expected <= for_gpu.made.keys()
    for name in ("decode_kernel", "prefill_kernel", "_gemv_kernel"):
        used = any(b"matrix_mad" in module for module in for_gpu.made[name])
        assert used == for_gpu.matrix, name
