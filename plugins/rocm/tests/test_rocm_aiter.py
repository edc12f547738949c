"""The pack over AITER, with a stand-in for the package: its functions and their arguments as AITER 0.1 has them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.bind import KernelTable
from octavo.plugin import OpContext
from octavo.plugin.version import refusal
from octavo_rocm import aiter_pack

HOST: Any = SimpleNamespace(type="cuda", torch_device=torch.device("cpu"))


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("aiter")
    module.__spec__ = SimpleNamespace(name="aiter")

    def add(out: Any, input: Any, residual_in: Any, residual_out: Any, weight: Any, epsilon: float) -> None:
        residual_out.copy_(input + residual_in)
        out.copy_(F.rms_norm(residual_out, weight.shape, weight, epsilon))

    def silu_and_mul(out: Any, input: Any) -> None:
        gate, up = input.chunk(2, dim=-1)
        out.copy_(F.silu(gate) * up)

    module.rms_norm = lambda input, weight, epsilon: F.rms_norm(input, weight.shape, weight, epsilon)
    module.rmsnorm2d_fwd_with_add = add
    module.silu_and_mul = silu_and_mul
    monkeypatch.setitem(sys.modules, "aiter", module)
    return module


def registered() -> KernelTable:
    table = KernelTable()
    aiter_pack.register_kernels(table, HOST)
    return table


def test_without_the_package_nothing_is_registered_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    assert not registered().providers("rms_norm")
    assert not caplog.text


def test_ops_are_offered_behind_those_that_are_measured(aiter: Any) -> None:
    table = registered()
    for name in ("rms_norm", "add_rms_norm", "act_and_mul"):
        [provider] = table.providers(name)
        assert (provider.provider, provider.priority) == ("aiter", 5)
    context = OpContext(op="act_and_mul", dtype="bfloat16", device_type="cuda", params={"kind": "gelu"})
    assert aiter_pack.takes_silu(context).reason == "computes silu, not gelu"
    assert not aiter_pack.takes_half(OpContext(op="rms_norm", dtype="float32", device_type="cuda")).ok


def test_no_rows_are_no_launch(aiter: Any) -> None:
    from octavo_rocm.aiter_ops import AiterOps

    ops, none = AiterOps(), torch.empty(0, 64)
    aiter.rms_norm = aiter.silu_and_mul = None
    assert ops.rms_norm(none, torch.ones(64), 1e-5).shape == (0, 64)
    assert ops.act_and_mul(none, "silu").shape == (0, 32)
    assert [t.shape for t in ops.add_rms_norm(none, none, torch.ones(64), 1e-5)] == [(0, 64)] * 2


@pytest.mark.parametrize("name", ["rms_norm", "rmsnorm2d_fwd_with_add", "silu_and_mul"])
def test_a_package_that_is_wrong_is_named_and_not_used(aiter: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    right = getattr(aiter, name)

    def wrong(first: Any, *rest: Any) -> Any:
        y = right(first, *rest)
        return first.mul_(1.1) if y is None else y * 1.1

    setattr(aiter, name, wrong)
    assert not registered().providers("rms_norm")
    assert "self-test" in caplog.text


def test_a_package_that_lacks_a_function_is_named(aiter: Any, caplog: pytest.LogCaptureFixture) -> None:
    del aiter.silu_and_mul
    assert not registered().providers("rms_norm")
    assert "cannot be loaded" in caplog.text


def test_the_pack_is_for_this_platform_and_api() -> None:
    assert {"rocm"} == aiter_pack.PLATFORMS
    assert refusal(aiter_pack.API) == ""
