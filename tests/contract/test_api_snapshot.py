"""No change of the plugin API goes unseen."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.plugin.version import PLUGIN_API, PLUGIN_API_FLOOR
from octavo.testing.api_snapshot import snapshot

GOLDEN = Path(__file__).with_name("api_snapshot.json")
REGENERATE = (
    "the plugin API changed. If that is wanted: raise PLUGIN_API in octavo/plugin/version.py (minor for an addition, "
    "major for a removal), add a frozen plugin to tests/compat, and run "
    "`python -m octavo.testing.api_snapshot > tests/contract/api_snapshot.json`"
)


def test_the_plugin_api_is_what_the_snapshot_says() -> None:
    assert json.loads(json.dumps(snapshot())) == json.loads(GOLDEN.read_text()), REGENERATE


def test_the_snapshot_sees_hooks_protocols_and_data() -> None:
    found = snapshot()
    assert found["hooks"]["make_device"]["mandatory"]
    assert not found["hooks"]["register_kernels"]["firstresult"]
    assert found["protocols"]["KernelRegistry"]["op"].endswith("graph_safe: bool = True) -> None")
    assert "supports: Callable[[OpContext], Support] = always" in found["protocols"]["KernelRegistry"]["op"]
    assert found["dataclasses"]["Probe"]["score"] == "int = 0"


def test_the_floor_is_not_above_the_version() -> None:
    assert PLUGIN_API_FLOOR <= PLUGIN_API
