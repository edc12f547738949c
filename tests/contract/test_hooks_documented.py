"""Every hook, capability and contract is documented."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.plugin import PlatformCaps, hookspecs
from octavo.testing.api_snapshot import hooks, snapshot

ROOT = Path(__file__).parents[2]
HOOKS = (ROOT / "docs" / "hooks.md").read_text()


def test_every_hook_says_what_it_is_for_and_its_default() -> None:
    for name, function in hooks().items():
        text = function.__doc__ or ""
        expected = "Mandatory" if name in hookspecs.MANDATORY else "Default"
        said = expected in text or name in ("register_extensions", "worker_event")
        assert said, f"the docstring of {name} must start with 'Mandatory' or name the default"
        assert f"### `{name}`" in HOOKS


def test_every_contract_has_a_docstring() -> None:
    api = snapshot()
    for name in [*api["protocols"], *api["dataclasses"]]:
        assert f"### `{name}`\n\n```" not in HOOKS, f"{name} has no docstring"
        assert f"### `{name}`" in HOOKS


def test_every_capability_is_listed() -> None:
    section = HOOKS.split("### `PlatformCaps`")[1].split("###")[0]
    for name in PlatformCaps.__dataclass_fields__:
        assert re.search(rf"^{name}: ", section, re.MULTILINE), name
