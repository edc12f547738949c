"""The pack over AITER, with a stand-in for the package: its functions and their arguments as AITER 0.1 has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.ops.bind import KernelTable
from octavo.plugin.version import refusal
from octavo_rocm import aiter_ops, aiter_pack

HOST: Any = SimpleNamespace(type="cuda", torch_device=torch.device("cpu"))


OPS: dict[str, dict[str, object]] = {"rms_norm": {}, "add_rms_norm": {}, "act_and_mul": {"kind": "silu"}}


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
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
    forget()
    yield module
    forget()


def forget() -> None:
    aiter_ops.library.cache_clear()
    aiter_ops.objection.cache_clear()


def registered(**forced: str) -> KernelTable:
    table = KernelTable(forced=forced)
    aiter_pack.register_kernels(table, HOST)
    return table


def bound(table: KernelTable, name: str, dtype: str = "bfloat16", **params: object) -> Any:
    return table.bind(name, dtype=dtype, device=HOST, params=OPS[name] | params)


def test_without_the_package_nothing_is_registered() -> None:
    assert not registered().providers("rms_norm")


def test_ops_are_offered_behind_those_that_are_measured(aiter: Any) -> None:
    table = registered()
    for name in OPS:
        [provider] = table.providers(name)
        assert (provider.provider, provider.priority) == ("aiter", 5)
        assert bound(table, name) is getattr(aiter_ops, name)
    with pytest.raises(ConfigError, match="computes silu, not gelu"):
        bound(registered(act_and_mul="aiter"), "act_and_mul", kind="gelu")
    with pytest.raises(ConfigError, match="not float32"):
        bound(registered(rms_norm="aiter"), "rms_norm", "float32")


def test_the_package_is_neither_imported_nor_tested_until_it_is_asked_for(
    aiter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(aiter_ops, "import_module", lambda name: imported.append(name) or aiter)
    activate, activated = aiter.silu_and_mul, []
    aiter.silu_and_mul = lambda out, input: activated.append(1) or activate(out, input)
    table = registered()
    table.op("rms_norm", len, provider="measured", priority=10)
    assert bound(table, "rms_norm") is len
    assert not imported
    assert bound(table, "add_rms_norm") is aiter_ops.add_rms_norm
    assert bound(table, "act_and_mul") is aiter_ops.act_and_mul
    assert imported == ["aiter"]
    assert len(activated) == 1, "one test serves all ops"


def test_no_rows_are_no_launch(aiter: Any) -> None:
    none = torch.empty(0, 64)
    aiter.rms_norm = aiter.silu_and_mul = None
    assert aiter_ops.rms_norm(none, torch.ones(64), 1e-5).shape == (0, 64)
    assert aiter_ops.act_and_mul(none, "silu").shape == (0, 32)
    assert [t.shape for t in aiter_ops.add_rms_norm(none, none, torch.ones(64), 1e-5)] == [(0, 64)] * 2


@pytest.mark.parametrize("name", ["rms_norm", "rmsnorm2d_fwd_with_add", "silu_and_mul"])
def test_a_package_that_is_wrong_is_named_and_not_used(aiter: Any, name: str) -> None:
    right = getattr(aiter, name)

    def wrong(first: Any, *rest: Any) -> Any:
        y = right(first, *rest)
        return first.mul_(1.1) if y is None else y * 1.1

    setattr(aiter, name, wrong)
    assert bound(registered(), "rms_norm") is not aiter_ops.rms_norm
    with pytest.raises(ConfigError, match=r"--kernel rms_norm=aiter: .* of AITER fails its self-test"):
        bound(registered(rms_norm="aiter"), "rms_norm")


def test_a_package_that_lacks_a_function_is_named(aiter: Any) -> None:
    del aiter.silu_and_mul
    with pytest.raises(ConfigError, match=r"AITER cannot be used: .*silu_and_mul"):
        bound(registered(rms_norm="aiter"), "rms_norm")


def test_the_pack_is_for_this_platform_and_api() -> None:
    assert {"rocm"} == aiter_pack.PLATFORMS
    assert refusal(aiter_pack.API) == ""
