"""Every hook, capability and contract is documented."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.ops.catalogue import CATALOGUE
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


def test_what_a_porter_is_sent_to_exists() -> None:
    """The last column of the tables of the page for porters is about us: a name in code marks there is one of ours."""
    api = snapshot()
    owners = (
        api["protocols"] | api["dataclasses"] | {k: v for names in api["modules"].values() for k, v in names.items()}
    )
    fields = {name: set(members) for name, members in owners.items() if isinstance(members, dict)}
    fields["registry"] = fields["KernelRegistry"] | fields["ExtensionRegistry"]
    known = {*api["names"], *api["hooks"], *owners, *CATALOGUE, *set.union(*fields.values())}
    known |= {f"{owner}.{member}" for owner, members in fields.items() for member in members}
    foreign = {"octavo.platforms", "torch.empty"}

    lines = (ROOT / "docs" / "porting-from-vllm.md").read_text().splitlines()
    cells = [line.rstrip("| ").rpartition(" | ")[2] for line in lines if line.startswith("|")]
    marks = [mark for cell in cells for mark in re.findall(r"`([^`]+)`", cell)]
    # Without the arguments of a call; no flags and no requirements.
    named = {found[1] for mark in marks if (found := re.fullmatch(r"([A-Za-z_.]+)(\(.*\))?", mark))}
    assert len(named) > 30
    assert named - known - foreign == set()
