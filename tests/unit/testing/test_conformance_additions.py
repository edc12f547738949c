"""A kernel pack or an extension that is broken where a platform is checked fails the check, by its distribution."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.testing.conformance.run import FOLDER, run

PACK = """
from octavo.plugin import hookimpl
API, PLATFORMS = "{api}", {{"refdev"}}
@hookimpl
def register_kernels(registry):
    {body}
"""
EXTENSION = """
from octavo.plugin import hookimpl
@hookimpl
def register_extensions(registry):
    registry.model("llama", "mine:Model")
"""


def distribution(folder: Path, name: str, source: str, group: str) -> None:
    """`octavo-NAME`, as it would be installed."""
    (folder / f"{name}_module.py").write_text(source)
    info = folder / f"octavo_{name}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: octavo-{name}\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}_module\n")


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the kit says of the reference device beside a good pack and several bad things."""
    kernels = "octavo.kernels"
    distribution(tmp_path, "good", PACK.format(api="1.0", body="..."), kernels)
    distribution(tmp_path, "old", PACK.format(api="7.0", body="..."), kernels)
    distribution(tmp_path, "raising", PACK.format(api="1.0", body="raise OSError('libfast.so: wrong driver')"), kernels)
    elsewhere = PACK.format(api="7.0", body="...").replace("refdev", "another")
    distribution(tmp_path, "elsewhere", elsewhere, kernels)
    distribution(tmp_path, "taking", EXTENSION, "octavo.extensions")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
    monkeypatch.setattr("octavo.testing.conformance.run.FOLDER", only(tmp_path / "kit"))
    result = run("refdev", tiers=["0"], quiet=True)
    assert not result.passed
    return {test.partition("::")[2]: message for test, message in result.data["failures"].items()}


def only(folder: Path) -> Path:
    """The kit without the other tests of its tier, which take long and say nothing of additions."""
    folder.mkdir()
    for name in ("pytest.ini", "conftest.py", "test_t0_additions.py"):
        (folder / name).symlink_to(FOLDER / name)
    return folder


def test_broken_additions_fail_the_check_and_are_named(failures: dict[str, str]) -> None:
    assert set(failures) == {
        "test_every_kernel_pack_for_the_platform_can_be_opened",
        "test_every_kernel_pack_for_the_platform_registers_its_kernels",
        "test_every_extension_registers",
    }
    opened = failures["test_every_kernel_pack_for_the_platform_can_be_opened"]
    assert "octavo-old 0.3" in opened
    assert "plugin API 7.0" in opened
    assert "elsewhere" not in opened
    registered = failures["test_every_kernel_pack_for_the_platform_registers_its_kernels"]
    assert "octavo-raising 0.3" in registered
    assert "libfast.so: wrong driver" in registered
    assert "octavo-old" not in registered
    assert "'llama' is registered twice" in failures["test_every_extension_registers"]
