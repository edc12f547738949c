"""What the kernel driver says of the machine, through /sys: no HIP context, no torch, a few milliseconds.

    /sys/class/kfd/kfd/topology/nodes/<n>/properties          "simd_count 1216", "gfx_target_version 90402", ...
                                          mem_banks/<m>/...    "heap_type 1", "size_in_bytes 206141652992"

CPUs are nodes too, without a target. A card that a container was not given shows no properties or has no render node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.plugin import DeviceDesc
from octavo_rocm.targets import arch_of

ROOT = Path("/")
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""The runtime's choice, then HIP's among what that leaves."""
HIP_ALSO_READS = "CUDA_VISIBLE_DEVICES"
DEVICE_MEMORY = {1, 2}
"""Heap types of a card's own memory: all that the host sees, and the rest."""


class DriverError(Exception):
    """There is no AMD driver, or it is not for this process; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card: how a person would describe it, and its architecture."""

    desc: DeviceDesc
    arch: str


def cards(root: Path = ROOT, environment: Mapping[str, str] | None = None) -> list[Card]:
    """The cards that a process with this environment gets, in its order. Raises DriverError without a driver."""
    kfd = root / "dev/kfd"
    if not kfd.exists():
        raise DriverError("no AMD driver: /dev/kfd is missing (install amdgpu, or give the container the device)")
    if not os.access(kfd, os.R_OK | os.W_OK):
        raise DriverError("no access to /dev/kfd: add this user to the group 'render'")
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    folders = sorted((p for p in nodes.glob("*") if p.name.isdecimal()), key=lambda p: int(p.name))
    found = [card for folder in folders if (card := read_card(folder, root)) is not None]
    numbered = [renumbered(card, index) for index, card in enumerate(found)]
    return visible(numbered, os.environ if environment is None else environment)


def read_card(folder: Path, root: Path) -> Card | None:
    """The card of a node; None for a CPU, and for a card of somebody else's."""
    facts = properties(folder / "properties")
    version, minor = facts.get("gfx_target_version", 0), facts.get("drm_render_minor", 0)
    if not version or not facts.get("simd_count") or not (root / f"dev/dri/renderD{minor}").exists():
        return None
    banks = [properties(bank / "properties") for bank in folder.glob("mem_banks/*")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in DEVICE_MEMORY)
    location = facts.get("location_id", 0)
    pci = f"{facts.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    arch = arch_of(version)
    unique = facts.get("unique_id", 0)
    desc = DeviceDesc(
        name=product_name(root, minor) or f"AMD {arch}",
        memory=memory,
        compute_units=facts["simd_count"] // max(facts.get("simd_per_cu", 1), 1),
        uuid=f"GPU-{unique:016x}" if unique else "",
        pci=pci,
    )
    return Card(desc=desc, arch=arch)


def properties(path: Path) -> dict[str, int]:
    """The numbers of a file of "name number" lines; empty if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def product_name(root: Path, minor: int) -> str:
    """What the vendor wrote into the card ("AMD Instinct MI300X"); empty if nothing."""
    try:
        return (root / f"sys/class/drm/renderD{minor}/device/product_name").read_text().strip()
    except OSError:
        return ""


def visible(found: Sequence[Card], environment: Mapping[str, str]) -> list[Card]:
    """The cards that the runtime, and HIP behind it, leave. Chosen by number, or by the beginning of a uuid; as both
    of them do, the list ends at the first entry that names none."""
    left = list(found)
    for variable in VISIBLE:
        choice = environment.get(variable)
        if choice is None and variable == VISIBLE[1]:
            choice = environment.get(HIP_ALSO_READS)
        if choice is not None:
            left = chosen(left, choice)
    return [renumbered(card, index) for index, card in enumerate(left)]


def chosen(found: Sequence[Card], choice: str) -> list[Card]:
    taken: list[Card] = []
    for entry in (part.strip() for part in choice.split(",")):
        if entry.isdecimal():
            matches = [found[int(entry)]] if int(entry) < len(found) else []
        else:
            matches = [
                c for c in found if len(entry) > len("GPU-") and c.desc.uuid.startswith(entry.replace("gpu-", "GPU-"))
            ]
        if len(matches) != 1 or matches[0] in taken:
            break
        taken += matches
    return taken


def renumbered(card: Card, index: int) -> Card:
    return replace(card, desc=replace(card.desc, index=index))
