"""The pack over `intel-extension-for-pytorch` where that package is missing, or does not load beside this torch.

What it computes is tested in with_ipex, in an environment that has the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.ops.bind import KernelTable
from octavo.plugin import AttentionSpec
from octavo.plugin.torch import TorchDevice
from octavo_xpu import ipex_kernels

HOST = TorchDevice("cpu")
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, dtype="bfloat16", kv_dtype="bfloat16", block_size=16
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    ipex_kernels.library.cache_clear()
    ipex_kernels.objection.cache_clear()


def reason() -> str:
    """What its attention says to a model that asks for it."""
    table = KernelTable()
    ipex_kernels.register_kernels(table, HOST)
    from octavo_xpu.attention_ipex import IpexAttention

    return IpexAttention.supports(SPEC, HOST).reason


def test_a_missing_package_is_named() -> None:
    assert reason() == "the package intel-extension-for-pytorch is not installed"


def test_a_package_that_does_not_load_is_named_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ipex_kernels.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text('import os\nprint("ERROR! needs PyTorch 2.8.*")\nos.exit(127)\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert reason().startswith("intel-extension-for-pytorch does not load with torch 2.")
    assert reason().endswith("ERROR! needs PyTorch 2.8.*")


def test_the_pack_is_for_this_platform_alone() -> None:
    assert list(ipex_kernels.PLATFORMS) == ["xpu"]
