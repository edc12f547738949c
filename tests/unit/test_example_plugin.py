"""The smallest example platform, docs/examples/acme, loaded as a user would load it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.discovery import select, survey
from octavo.errors import PlatformNotFoundError
from octavo.ops.bind import KernelTable

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "acme"


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The example's entry points, as its pyproject.toml declares them."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = project["entry-points"]["octavo.platforms"]
    return found


def test_without_its_hardware_it_is_absent(extra: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_DEVICE", "/nonexistent/acme0")
    states = {report.name: report for report in survey(extra=extra)}
    assert states["acme"].state == "absent"
    assert "is the acme driver loaded?" in states["acme"].reason
    with pytest.raises(PlatformNotFoundError, match="/nonexistent/acme0 is missing"):
        select("acme", extra=extra)
    assert select(extra=extra).name == "cpu"


def test_with_its_hardware_it_is_chosen_and_its_kernel_bound(
    extra: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "acme0").touch()
    monkeypatch.setenv("ACME_DEVICE", str(tmp_path / "acme0"))
    platform = select(extra=extra)
    assert platform.name == "acme"
    device = platform.make_device(0, EngineConfig())
    assert device.memory().total == 2 << 30

    table = KernelTable()
    platform.register_kernels(table, device)
    table.bind("act_and_mul", dtype="float32", device=device, params={"kind": "silu"})
    table.bind("act_and_mul", dtype="float32", device=device, params={"kind": "gelu"})
    silu, gelu = table.choices
    assert (silu.provider, gelu.provider) == ("acme", "reference")
    assert gelu.refused == (("acme", "the unit computes silu, not gelu"),)
