"""Tier 4: every linear kernel against a float32 product, for plain weights and every quantization scheme it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from octavo.ops.activation import ACTIVATIONS
from octavo.plugin import BatchKey, LinearSpec
from octavo.quant.online import is_plain
from octavo.testing.conformance.schemes import SCHEMES, plain_numbers, quantized_weight
from octavo.testing.conformance.subject import Kernel, Subject, check_usefulness

ALLOWED = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
"""Error by dtype, as a share of the largest result."""

ONLINE = {"fp8_e4m3": 0.08, "int8": 0.03, "int4": 0.03}
"""The same for weights that are quantized while they are loaded, by number format: a kernel may keep activations as
they are or round them as it rounds weights, which fp8 keeps to 1/16 and int8 to 1/254 of a row's largest."""

SHAPES = ((64, 96, False), (256, 128, True), (512, 256, False))
"""(in_features, out_features, bias)."""

NUM_TOKENS = (0, 1, 3, 16, 33, 128)

Case = tuple[LinearSpec, dict[str, torch.Tensor], torch.Tensor]
"""(spec, canonical weights, the weight in float32)."""


def plain_cases(dtype: str) -> Iterator[Case]:
    """Unquantized layers."""
    for in_features, out_features, bias in SHAPES:
        generator = torch.Generator().manual_seed(in_features)
        weight = torch.randn(out_features, in_features, generator=generator).to(getattr(torch, dtype))
        yield spec_of(dtype, in_features, out_features, bias), {"weight": weight}, weight.float()


def spec_of(dtype: str, in_features: int, out_features: int, bias: bool = False) -> LinearSpec:
    return LinearSpec(
        in_features=in_features,
        out_features=out_features,
        act_dtype=dtype,
        out_dtype=dtype,
        bias=bias,
        max_tokens=max(NUM_TOKENS),
    )


def quantized_case(dtype: str, packing: str) -> Case:
    """A layer whose weight is packed so."""
    scheme, out_features, in_features = SCHEMES[packing], 96, 256
    weight = quantized_weight(scheme, out_features, in_features, seed=5, dtype=dtype)
    spec = replace(spec_of(dtype, in_features, out_features), scheme=scheme)
    return spec, {"weight": weight}, plain_numbers(weight, scheme)


def test_a_linear_kernel_multiplies(subject: Subject, linear: Kernel, dtype: str) -> None:
    ran = [check(subject, linear, *case) for case in plain_cases(dtype)]
    if not any(ran):
        pytest.skip("refuses plain weights in this dtype")


def test_a_linear_class_is_good_for_something(subject: Subject, linear: Kernel) -> None:
    dtypes = subject.caps.dtypes
    plain = [spec_of(dtype, *shape) for dtype in dtypes for shape in SHAPES]
    packed = [quantized_spec(dtype, packing) for dtype in dtypes for packing in SCHEMES]
    check_usefulness(subject, linear, [*plain, *packed])


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_a_linear_kernel_applies_the_gates_that_it_lists(
    subject: Subject, linear: Kernel, dtype: str, kind: str
) -> None:
    if kind not in getattr(linear.fn, "gates", ()):
        pytest.skip(f"does not apply {kind} gates; core applies them to its product")
    cases = [(replace(spec, gate=kind), weights, exact) for spec, weights, exact in plain_cases(dtype)]
    ran = [check(subject, linear, *case) for case in cases]
    if not any(ran):
        pytest.skip("refuses gated products of plain weights in this dtype")


@pytest.mark.parametrize("packing", SCHEMES)
def test_a_linear_kernel_multiplies_weights_packed_as(
    subject: Subject, linear: Kernel, dtype: str, packing: str
) -> None:
    if not takes(subject, linear, quantized_spec(dtype, packing)):
        pytest.skip(f"refuses {packing}")
    check(subject, linear, *quantized_case(dtype, packing))


def test_a_linear_kernel_can_be_replayed(subject: Subject, linear: Kernel) -> None:
    if subject.caps.graph == "none" or linear.provider == "reference":
        pytest.skip("nothing claimed")
    device, dtype = subject.device, subject.caps.default_dtype
    spec, weights, _ = next(plain_cases(dtype))
    if not takes(subject, linear, spec):
        pytest.skip("refuses plain weights in this dtype")
    runner = subject.platform.make_graph_runner(subject.config, device)
    assert runner is not None
    with device.inference():
        kernel = linear.fn()
        packed = kernel.prepare(dict(weights), spec, device)
        x = torch.ones(4, spec.in_features, dtype=getattr(torch, dtype), device=device.torch_device)
        handle = runner.prepare(BatchKey(num_tokens=4, num_seqs=4), lambda: kernel.apply(x, packed, None))
        for value in (-1.0, 0.5):
            x.fill_(value)
            got = runner.run(handle).clone()
            expected = kernel.apply(x, packed, None)
            device.synchronize()
            assert torch.equal(got, expected), f"a replay at {value} differs from a call"
    runner.close()


def quantized_spec(dtype: str, packing: str) -> LinearSpec:
    """The spec of `quantized_case`, without the work of making its weight."""
    return replace(spec_of(dtype, 256, 96), scheme=SCHEMES[packing])


def takes(subject: Subject, linear: Kernel, spec: LinearSpec) -> bool:
    """Whether the kernel takes the spec; a refusal must give its reason."""
    answer = linear.fn.supports(spec, subject.device)
    assert answer.ok or answer.reason, "a refusal must carry a reason"
    return bool(answer.ok)


def check(
    subject: Subject, linear: Kernel, spec: LinearSpec, weights: dict[str, torch.Tensor], exact: torch.Tensor
) -> bool:
    """Compare products of several sizes. False if the kernel refuses the spec."""
    device = subject.device
    if not takes(subject, linear, spec):
        return False
    allowed = subject.settings.error("linear", spec.act_dtype, ALLOWED[spec.act_dtype])
    if spec.scheme is not None:
        if is_plain(spec.scheme):
            allowed = max(allowed, ONLINE[spec.scheme.weight])
        allowed = subject.settings.error(f"linear-{spec.scheme.packing}", spec.act_dtype, allowed)
    dtype = getattr(torch, spec.act_dtype)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(spec.out_features, generator=generator).to(dtype) if spec.bias else None
    target = device.torch_device
    with device.inference():
        kernel = linear.fn()
        given = {name: tensor.clone() for name, tensor in weights.items()}
        packed = kernel.prepare(given, spec, device)
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, spec.in_features, generator=generator).to(dtype)
            expected = torch.nn.functional.linear(x.float(), exact, bias.float() if bias is not None else None)
            if spec.gate is not None:
                gate, up = expected.chunk(2, dim=-1)
                expected = ACTIVATIONS[spec.gate](gate) * up
            arrived = x.to(target, copy=True)
            got = kernel.apply(arrived, packed, None if bias is None else bias.to(target))
            assert got.shape == expected.shape
            assert got.dtype == getattr(torch, spec.out_dtype)
            assert torch.equal(arrived.cpu(), x), "changes its activations, which other layers read too"
            if num_tokens:
                error = (got.cpu().float() - expected).abs().max() / expected.abs().max()
                assert error <= allowed, (
                    f"{num_tokens} tokens: an error of {error:.2e} of the largest result, allowed {allowed:g} ({spec})"
                )
    subject.proved.add(str(linear))
    return True
