"""What the kernel says of the machine's GPUs, through sysfs: no driver library is opened, and no torch.

Torch's Intel GPUs are those of the kernel drivers `xe` and `i915` for which Level Zero has a user-space driver. A probe
has to promise what the process will get, so Level Zero's rules are repeated here, as its driver has them:

    cards      discrete ones first, each kind by PCI address; with ZE_ENABLE_PCI_ID_DEVICE_ORDER=1 all by address
    devices    a card, or each of its tiles: ZE_FLAT_DEVICE_HIERARCHY
    visible    those whose numbers ZE_AFFINITY_MASK lists

and then torch's: where there is a discrete GPU, integrated ones are left out.
"""

from __future__ import annotations

import ctypes.util
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from octavo.plugin import DeviceDesc

SYSFS = Path("/sys/class/drm")
INTEL = "0x8086"
DRIVERS = ("xe", "i915")
VISIBLE = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
PCI_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
LOADER = "ze_loader"

MAX = "Intel Data Center GPU Max"
"""The one family of several tiles."""
NAMES = {
    "0x0b69": MAX,
    "0x0bd": MAX,
    "0x0be": MAX,
    "0x56c": "Intel Data Center GPU Flex",
    "0x56": "Intel Arc A-series",
    "0xe20": "Intel Arc B-series",
    "0xe21": "Intel Arc Pro B-series",
    "0x64": "Intel Arc (Lunar Lake)",
    "0x7d": "Intel Arc (Meteor or Arrow Lake)",
}
"""Beginnings of PCI device ids -> a name for people, the longest that fits. sysfs has no names."""
INTEGRATED = ":00:02."
"""In the PCI address of every GPU that is part of an Intel CPU."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU as the kernel sees it. memory: bytes of its own. tiles: how many. Both are 0 where it is not told."""

    pci: str
    name: str
    memory: int
    tiles: int

    @property
    def integrated(self) -> bool:
        # A virtual machine may have a discrete one at that address: it has memory.
        return INTEGRATED in self.pci and not self.memory


def gpus(sysfs: Path | None = None) -> list[DeviceDesc]:
    """The devices that torch gives this process, in its order and with its numbers. memory: in bytes, of a tile where
    the device is one."""
    found = cards(sysfs or SYSFS)
    found.sort(key=lambda card: (card.integrated and os.environ.get(PCI_ORDER) != "1", card.pci))
    seen = visible(found, os.environ)
    listed = [(card, tiles) for card, tiles in seen if not card.integrated] or seen
    return [
        DeviceDesc(name=card.name, index=index, memory=card.memory * tiles // max(card.tiles, 1), pci=card.pci)
        for index, (card, tiles) in enumerate(listed)
    ]


def cards(sysfs: Path) -> list[Card]:
    """Intel GPUs with a kernel driver that torch can use."""
    found = []
    for node in sysfs.glob("renderD*"):
        device = node / "device"
        driver = (device / "driver").resolve().name
        if read(device / "vendor") != INTEL or driver not in DRIVERS:
            continue
        name = name_of(read(device / "device"))
        tiles = tiles_of(device) if name == MAX else 1
        found.append(Card(pci=device.resolve().name, name=name, memory=memory_of(device), tiles=tiles))
    return found


def read(path: Path) -> str:
    """A file's text, or nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def name_of(device_id: str) -> str:
    """A GPU's name by its PCI id."""
    fits = [start for start in NAMES if device_id.startswith(start)]
    return NAMES[max(fits, key=len)] if fits else f"Intel GPU {device_id}"


def memory_of(device: Path) -> int:
    """Bytes of the GPU's own memory; 0 where it uses the host's, or does not tell.

    i915 tells it (lmem_total_bytes, in some kernels); else it is the largest PCI window, which resizable BARs make as
    large as the memory."""
    if told := read(device / "lmem_total_bytes"):
        return int(told)
    windows = [line.split() for line in read(device / "resource").splitlines()]
    sizes = [int(end, 16) - int(start, 16) + 1 for start, end, *_ in windows if int(end, 16)]
    largest = max(sizes, default=0)
    return largest if largest > 1 << 30 else 0


def tiles_of(device: Path) -> int:
    """Tiles of a Data Center GPU Max: xe has a folder for each, i915 one for the engines (gt) of each; 0: neither."""
    return len(list(device.glob("tile[0-9]*")) or list(device.glob("drm/card*/gt/gt[0-9]*")))


def visible(found: Sequence[Card], environment: Mapping[str, str]) -> list[tuple[Card, int]]:
    """What Level Zero makes of cards in this order: for each device its card, and how many tiles of it.

    FLAT and COMBINED make each tile a device: the mask counts tiles, and has no other form. COMPOSITE makes each card
    one, with those of its tiles that the mask lists: "0" for all, "0.1" for one. Where the tiles of a card are not
    known, nobody can tell what a mask counts, and it hides nothing.
    """
    mode = environment.get(HIERARCHY)
    if mode not in ("FLAT", "COMBINED", "COMPOSITE"):
        mode = "FLAT" if any(card.name == MAX for card in found) else "COMPOSITE"
    flat = mode != "COMPOSITE"
    tiles = [(number, tile) for number, card in enumerate(found) for tile in range(max(card.tiles, 1))]
    mask = environment.get(VISIBLE)
    if mask and all(card.tiles for card in found):
        words = {word.strip() for word in mask.split(",")}
        names = [{str(i)} if flat else {str(number), f"{number}.{tile}"} for i, (number, tile) in enumerate(tiles)]
        tiles = [tile for tile, of_it in zip(tiles, names, strict=True) if of_it & words]
    if flat:
        return [(found[number], 1) for number, _ in tiles]
    return [(found[number], count) for number, count in Counter(number for number, _ in tiles).items()]


def missing_software() -> str:
    """What a process needs besides the kernel driver and has not got; empty if it has all."""
    if ctypes.util.find_library(LOADER) is None:
        return "the Level Zero loader (libze_loader.so.1) is not installed; on Debian: apt install libze1"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return "torch is not installed"
    if "+" in torch and not torch.partition("+")[2].startswith("xpu"):
        return f"torch {torch} is not an XPU build: pip install torch --index-url https://download.pytorch.org/whl/xpu"
    return ""
