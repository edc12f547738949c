"""Tier 4: routed experts, whole and divided among ranks, plain and in every quantization scheme that a kernel takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.ops.activation import ACTIVATIONS
from octavo.plugin import MoESpec
from octavo.quant.online import is_plain
from octavo.testing.conformance.schemes import SCHEMES, plain_numbers, quantized_weight
from octavo.testing.conformance.subject import Kernel, Subject, check_usefulness
from octavo.testing.conformance.test_t4_linear import ONLINE

ALLOWED = {"float32": 1e-4, "float16": 8e-3, "bfloat16": 4e-2}
"""Error by dtype, as a share of the largest result: of two products, with an activation between them."""

EXPERTS, HIDDEN, INNER = 6, 256, 256
NUM_TOKENS = (0, 1, 3, 17, 64)

Weights = dict[str, torch.Tensor]


def spec_of(dtype: str, top_k: int = 2, activation: str = "silu") -> MoESpec:
    return MoESpec(
        num_experts=EXPERTS,
        top_k=top_k,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        activation=activation,
        act_dtype=dtype,
    )


def made(spec: MoESpec) -> tuple[Weights, Weights]:
    """(weights as `MoEKernel` says, the numbers they stand for): gate_up [E, 2 I, K] and down [E, K, I], small enough
    that what comes out is of the size of what goes in."""
    packed, exact = {}, {}
    for seed, (name, rows, columns) in enumerate((("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER))):
        if spec.scheme is None:
            generator = torch.Generator().manual_seed(seed)
            weight = torch.randn(EXPERTS, rows, columns, generator=generator) / 16
            packed[name] = weight.to(getattr(torch, spec.act_dtype))
            exact[name] = packed[name].float()
        else:
            flat = quantized_weight(spec.scheme, EXPERTS * rows, columns, seed=seed, dtype=spec.act_dtype)
            flat = flat / 16 if flat.is_floating_point() else flat
            packed[f"{name}.weight"] = flat.view(EXPERTS, rows, -1)
            exact[name] = plain_numbers(flat, spec.scheme).view(EXPERTS, rows, columns)
    return packed, exact


def routed(num_tokens: int, top_k: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [T, K], ids int64 [T, k], shares float32 [T, k]). Nobody chooses the last expert."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(getattr(torch, dtype))
    scores = torch.rand(num_tokens, EXPERTS - 1, generator=generator)
    shares, ids = scores.softmax(-1).topk(top_k, dim=-1)
    return x, ids, shares


def expected(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, exact: Weights, kind: str) -> torch.Tensor:
    """Float32, one token and choice after another."""
    out = torch.zeros(x.shape)
    for token, (chosen, weights) in enumerate(zip(ids.tolist(), shares, strict=True)):
        for expert, share in zip(chosen, weights, strict=True):
            gate, up = (exact["gate_up"][expert] @ x[token].float()).chunk(2)
            out[token] += share * (exact["down"][expert] @ (ACTIVATIONS[kind](gate) * up))
    return out


def takes(subject: Subject, moe: Kernel, spec: MoESpec) -> bool:
    answer = moe.fn.supports(spec, subject.device)
    assert answer.ok or answer.reason, "a refusal must carry a reason"
    return bool(answer.ok)


def error_allowed(subject: Subject, spec: MoESpec) -> float:
    allowed = subject.settings.error("moe", spec.act_dtype, ALLOWED[spec.act_dtype])
    if spec.scheme is None:
        return allowed
    if is_plain(spec.scheme):
        allowed = max(allowed, 2 * ONLINE[spec.scheme.weight])
    return subject.settings.error(f"moe-{spec.scheme.packing}", spec.act_dtype, allowed)


def check(subject: Subject, moe: Kernel, spec: MoESpec) -> bool:
    """Compare over several numbers of tokens. False if the kernel refuses the spec."""
    if not takes(subject, moe, spec):
        return False
    device, allowed = subject.device, error_allowed(subject, spec)
    packed, exact = made(spec)
    with device.inference():
        kernel = moe.fn()
        ready = kernel.prepare(packed, spec, device)
        for num_tokens in NUM_TOKENS:
            x, ids, shares = routed(num_tokens, spec.top_k, spec.act_dtype)
            got = apply(kernel, ready, x, ids, shares, None, device.torch_device)
            assert (got.shape, got.dtype) == (x.shape, x.dtype)
            if num_tokens:
                right = expected(x, ids, shares, exact, spec.activation)
                error = (got.float() - right).abs().max() / right.abs().max()
                assert error <= allowed, (
                    f"{num_tokens} tokens: an error of {error:.2e} of the largest result, allowed {allowed:g} ({spec})"
                )
    subject.proved.add(str(moe))
    return True


def apply(
    kernel: Any,
    ready: Any,
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    places: torch.Tensor | None,
    target: torch.device,
) -> torch.Tensor:
    """One call on the device; its result on the CPU."""
    arrived = x.to(target, copy=True)
    local = None if places is None else places.to(target)
    got: torch.Tensor = kernel.apply(arrived, ids.to(target), shares.to(target), ready, local).cpu()
    assert torch.equal(arrived.cpu(), x), "changes its activations, which a shared expert reads too"
    return got


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_experts_give_the_weighted_sum(subject: Subject, moe: Kernel, dtype: str, top_k: int) -> None:
    if not check(subject, moe, spec_of(dtype, top_k)):
        pytest.skip("refuses plain experts in this dtype")


def test_a_class_of_experts_is_good_for_something(subject: Subject, moe: Kernel) -> None:
    plain = [spec_of(dtype) for dtype in subject.caps.dtypes]
    packed = [replace(spec_of(subject.caps.default_dtype), scheme=scheme) for scheme in SCHEMES.values()]
    check_usefulness(subject, moe, [*plain, *packed])


@pytest.mark.parametrize("kind", sorted(set(ACTIVATIONS) - {"silu"}))
def test_experts_apply_their_activation(subject: Subject, moe: Kernel, dtype: str, kind: str) -> None:
    if not check(subject, moe, spec_of(dtype, activation=kind)):
        pytest.skip(f"refuses {kind}")


@pytest.mark.parametrize("packing", SCHEMES)
def test_experts_packed_as(subject: Subject, moe: Kernel, packing: str) -> None:
    if not check(subject, moe, replace(spec_of(subject.caps.default_dtype), scheme=SCHEMES[packing])):
        pytest.skip(f"refuses {packing}")


def test_the_parts_of_ranks_add_up_to_the_whole(subject: Subject, moe: Kernel, dtype: str) -> None:
    spec, device = spec_of(dtype), subject.device
    if not takes(subject, moe, spec):
        pytest.skip("refuses plain experts in this dtype")
    packed, exact = made(spec)
    x, ids, shares = routed(17, spec.top_k, dtype)
    # Uneven shares; the last rank holds the expert that nobody chose, and nothing else.
    held_by_rank, total = ((4, 0), (1, 3, 2), (5,)), torch.zeros(x.shape)
    with device.inference():
        for held in held_by_rank:
            places = torch.full((EXPERTS,), -1)
            places[list(held)] = torch.arange(len(held))
            kernel = moe.fn()
            mine = kernel.prepare({name: weight[list(held)] for name, weight in packed.items()}, spec, device)
            part = apply(kernel, mine, x, ids, shares, places, device.torch_device)
            if held == (5,):
                assert not part.any(), "a rank whose experts nobody chose must add nothing"
            total += part.float()
    right = expected(x, ids, shares, exact, spec.activation)
    assert (total - right).abs().max() / right.abs().max() <= 2 * error_allowed(subject, spec)
