"""No change of the plugin API goes unseen, and what was published stays on offer."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_changes import breaks

from octavo.plugin.version import PLUGIN_API, PLUGIN_API_FLOOR
from octavo.testing.api_snapshot import TRITON, snapshot

ROOT = Path(__file__).parents[2]
DIGESTS = {(1, 0): "f93fc70bdf993d16"}
"""Version -> of its frozen snapshot: `sha256sum FILE | cut -c1-16`. None changes once its version is published."""

Change = Callable[[dict[str, Any]], Any]


def frozen(version: tuple[int, int]) -> Path:
    return ROOT / "tests" / "compat" / "plugin_api_{}_{}".format(*version) / "api_snapshot.json"


REGENERATE = (
    "the plugin API is not what was frozen for its version. If the change is wanted: raise PLUGIN_API in "
    "octavo/plugin/version.py (minor for an addition, major for a removal), make the folder of the new version with "
    "`python -m octavo.testing.api_snapshot > tests/compat/plugin_api_MAJOR_MINOR/api_snapshot.json` and a plugin that "
    "uses what is new, and write the digest down here"
)


def test_the_plugin_api_is_what_was_frozen_for_its_version() -> None:
    assert PLUGIN_API in DIGESTS, REGENERATE
    assert json.loads(json.dumps(snapshot())) == json.loads(frozen(PLUGIN_API).read_text()), REGENERATE


def test_frozen_snapshots_are_as_they_were() -> None:
    found = {version: hashlib.sha256(frozen(version).read_bytes()).hexdigest()[:16] for version in DIGESTS}
    assert found == DIGESTS, "a frozen snapshot was edited: put it back, and raise PLUGIN_API for what is new"


def test_every_version_that_is_served_is_still_on_offer() -> None:
    for version in DIGESTS:
        if version >= PLUGIN_API_FLOOR and version[0] == PLUGIN_API[0]:
            assert list(breaks(json.loads(frozen(version).read_text()), snapshot())) == [], f"for plugins of {version}"


def test_the_floor_is_not_above_the_version() -> None:
    assert PLUGIN_API_FLOOR <= PLUGIN_API


def test_the_snapshot_sees_hooks_protocols_data_ops_and_triton() -> None:
    found = snapshot()
    assert found["hooks"]["make_device"]["mandatory"]
    assert not found["hooks"]["register_kernels"]["firstresult"]
    assert found["protocols"]["KernelRegistry"]["op"].endswith("graph_safe: bool = True) -> None")
    assert "supports: Callable[[OpContext], Support] = always" in found["protocols"]["KernelRegistry"]["op"]
    assert found["dataclasses"]["Probe"]["score"] == "int = 0"
    assert found["ops"]["add_rms_norm"] == {
        "signature": "(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]",
        "given_up": ["residual", "x"],
        "params": ["size"],
    }
    assert "with_tuning" in found["triton"]["attention_backend"]["TritonAttention"]


BROKEN: dict[str, Change] = {
    "always is no longer exported": lambda api: api["names"].remove("always"),
    "hooks: kv_layout is gone": lambda api: api["hooks"].pop("kv_layout"),
    "hook make_device was": lambda api: api["hooks"]["make_device"].update(signature="(local_rank: int) -> Device"),
    "hook worker_event was": lambda api: api["hooks"]["worker_event"].update(mandatory=True),
    "hook fresh is new and mandatory": lambda api: api["hooks"].update(fresh={"mandatory": True}),
    "protocol Device, which plugins implement, has changed: fresh": lambda api: api["protocols"]["Device"].update(
        fresh="(self) -> None"
    ),
    "KernelRegistry.attention was": lambda api: api["protocols"]["KernelRegistry"].update(
        attention="(self, cls: type, *, priority: int, fresh: int) -> None"
    ),
    "Probe.score was int = 0, is int = 1": lambda api: api["dataclasses"]["Probe"].update(score="int = 1"),
    "Probe.devices was tuple[DeviceDesc, ...] = (), is gone": lambda api: api["dataclasses"]["Probe"].pop("devices"),
    "Probe.fresh is new and has no default": lambda api: api["dataclasses"]["Probe"].update(fresh="int"),
    "torch.TorchDevice.pin was": lambda api: api["modules"]["torch"]["TorchDevice"].pop("pin"),
    "torch.quantize_rows was": lambda api: api["modules"]["torch"].update(quantize_rows="() -> None"),
    "triton: ops is gone": lambda api: api["triton"].pop("ops"),
    "op greedy, which plugins implement, was": lambda api: api["ops"]["greedy"].update(
        signature="(logits: Tensor, fresh: int = 0) -> Tensor"
    ),
    "op act_and_mul: params has no kind any more": lambda api: api["ops"]["act_and_mul"].update(params=["size"]),
    "op add_rms_norm: given_up has no x any more": lambda api: api["ops"]["add_rms_norm"].update(given_up=["residual"]),
}
"""What is said of a change -> the change."""


@pytest.mark.parametrize("said", BROKEN)
def test_what_an_old_plugin_would_miss_is_named(said: str) -> None:
    new = copy.deepcopy(snapshot())
    BROKEN[said](new)
    [line] = breaks(snapshot(), new)
    assert line.startswith(said)


ADDED: dict[str, Change] = {
    "a name": lambda api: api["names"].append("fresh"),
    "a hook": lambda api: api["hooks"].update(fresh={"signature": "() -> None", "mandatory": False}),
    "an argument of a hook": lambda api: api["hooks"]["worker_event"].update(
        signature=api["hooks"]["worker_event"]["signature"].replace(")", ", fresh: int)", 1)
    ),
    "a method that plugins call": lambda api: api["protocols"]["KernelRegistry"].update(fresh="(self) -> None"),
    "an argument that plugins may give": lambda api: api["protocols"]["KernelRegistry"].update(
        op=api["protocols"]["KernelRegistry"]["op"].replace(") -> None", ", fresh: int = 0) -> None")
    ),
    "a field": lambda api: api["dataclasses"]["Probe"].update(fresh="int = 0"),
    "a function": lambda api: api["modules"]["torch"].update(fresh="(x: Tensor) -> Tensor"),
    "a value": lambda api: api["modules"]["recording"].update(FRESH="int"),
    "a field of a tuning": lambda api: api["triton"]["gemv"]["GemvConfig"].update(fresh="int = ..."),
    "an op": lambda api: api["ops"].update(fresh={"signature": "() -> None", "given_up": [], "params": []}),
    "what an op tells": lambda api: api["ops"]["rope"]["params"].append("fresh"),
}


@pytest.mark.parametrize("what", ADDED)
def test_an_addition_breaks_nothing(what: str) -> None:
    new = copy.deepcopy(snapshot())
    ADDED[what](new)
    assert new != snapshot()
    assert list(breaks(snapshot(), new)) == []


def test_platforms_import_nothing_of_octavo_triton_but_what_is_frozen() -> None:
    used = {
        (module, name)
        for path in (ROOT / "plugins").glob("*/src/**/*.py")
        for module, name in of_triton(path.read_text())
    }
    assert len(used) > 10
    assert used <= {(module, name) for module, names in TRITON.items() for name in names}


def of_triton(source: str) -> set[tuple[str, str]]:
    """(module of octavo.triton, name) of what a source takes from there."""
    nodes = list(ast.walk(ast.parse(source)))
    found: set[tuple[str, str]] = set()
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "octavo.triton":
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("octavo.triton."):
            found |= {(str(node.module).split(".")[2], alias.name) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add((modules[node.value.id], node.attr))
    return found
