"""What a plugin is asked to say, something listens to: no field of the plugin API is dead.

By text, not by types: `caps.streams` counts for `PlatformCaps.streams`, whatever `caps` is.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo.plugin

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "octavo"
DECLARED = {
    "BucketSpec": {"buckets", "found"},
    "ConfigPatch": {"patch"},
    "DeviceDesc": {"desc", "device", "describe"},
    "GroupSpec": {"spec", "group"},
    "KVLayout": {"layout"},
    "MemInfo": {"memory", "before", "after", "info", "now"},
    "OptionSpec": {"spec"},
    "PlatformCaps": {"caps"},
    "PlatformInfo": {"info"},
    "Probe": {"probe"},
    "QuantLayer": {"quant"},
    "QuantTensor": {"kind"},
    "Along": {"along", "rows", "columns"},
    "ScheduleLimits": {"schedule", "limits"},
    "Support": {"answer", "self"},
    "WorkerLaunch": {"launch"},
}
"""What a plugin says to core -> what core calls the thing when it reads it: the last name before the field's."""

ASKED = {"AttentionSpec", "AttnBatch", "AttnLayer", "BatchLimits", "KVSpec", "LinearSpec", "MatrixSpec", "OpContext"}
ASKED |= {"DraftInput", "DrafterSpec"}
"""What core says to plugins; kernels and drafters read it: core's own, one of this repository's, an example's."""

EXCUSED = {
    "DeviceDesc.uuid": "`octavo plugin list --json` prints the whole of it",
    "DeviceDesc.numa": "likewise",
    "DeviceDesc.index": "likewise",
    "PlatformCaps.triton": "for kernel packs, which are handed the capabilities of a platform that they do not know",
    "PlatformCaps.fp8": "likewise",
    "PlatformCaps.extras": "the platform's own",
}
"""Fields that nothing in core reads by name, and why they are there."""


def reads(*folders: Path) -> Iterator[tuple[str, str]]:
    """(the last name before the dot, the name behind it) of every attribute that is read."""
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield last_name(node.value), node.attr


def last_name(node: ast.expr) -> str:
    """ "caps" of `caps`, `self.caps` and `platform.caps()`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.fixture(scope="module")
def core_reads() -> set[tuple[str, str]]:
    return set(reads(CORE))


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_core_reads_every_field_that_a_plugin_may_set(name: str, core_reads: set[tuple[str, str]]) -> None:
    unread = [
        field.name
        for field in dataclasses.fields(getattr(octavo.plugin, name))
        if f"{name}.{field.name}" not in EXCUSED
        and not any((receiver, field.name) in core_reads for receiver in DECLARED[name])
    ]
    assert not unread, f"nothing in core reads {name}.{', '.join(unread)}: remove it, or let core read it"


def test_kernels_read_every_field_that_core_tells_them() -> None:
    names = {name for _, name in reads(CORE / "ops", CORE / "triton", ROOT / "plugins", ROOT / "docs" / "examples")}
    names |= {name for _, name in reads(CORE / "quant", CORE / "layers", CORE / "speculate")}
    unread = [
        f"{cls}.{field.name}"
        for cls in sorted(ASKED)
        for field in dataclasses.fields(getattr(octavo.plugin, cls))
        if field.name not in names
    ]
    assert not unread, f"no kernel reads {', '.join(unread)}"


def test_every_excuse_is_for_a_field_that_is_there_and_unread(core_reads: set[tuple[str, str]]) -> None:
    for excuse in EXCUSED:
        name, _, field = excuse.partition(".")
        assert field in {f.name for f in dataclasses.fields(getattr(octavo.plugin, name))}, f"{excuse} is gone"


def test_every_dataclass_of_the_door_is_in_one_of_the_lists() -> None:
    """Those left out travel each step between scheduler and runner, or are read whole."""
    whole = {"Admit", "Batch", "BatchKey", "BlockUpdate", "EngineConfig", "KVGroup", "KVPlan", "KVView", "Masks"}
    whole |= {"MoESpec", "MultipleOf", "QuantScheme", "StepResult", "TokenLogprobs"}
    exported = {name: getattr(octavo.plugin, name) for name in octavo.plugin.__all__}
    data = {name for name, cls in exported.items() if inspect.isclass(cls) and dataclasses.is_dataclass(cls)}
    assert data == whole | ASKED | set(DECLARED)
