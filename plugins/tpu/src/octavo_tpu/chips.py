"""Which TPU chips this machine hands to programs. Reads files only."""

from __future__ import annotations

from pathlib import Path

from octavo.plugin import DeviceDesc

GOOGLE = "0x1ae0"
GIB = 1 << 30

KINDS: dict[str, tuple[str, int]] = {
    "0x005e": ("TPU v4", 32 * GIB),
    "0x0062": ("TPU v5p", 95 * GIB),
    "0x0063": ("TPU v5e", 16 * GIB),
    "0x006f": ("TPU v6e", 32 * GIB),
    "0x0076": ("TPU v7", 192 * GIB),
}
"""PCI device id -> name and memory of a chip, as Google's documentation gives them."""


def find_chips(root: Path = Path("/")) -> list[DeviceDesc]:
    """The chips whose device file exists: /dev/vfio/GROUP or, with Google's own driver, /dev/accelN. Sorted by place.

    root: where to look for /sys and /dev. No device is opened: another process may be using it.
    """
    found: list[DeviceDesc] = []
    accel = sorted((root / "dev").glob("accel*"))
    for place in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            if (place / "vendor").read_text().strip() != GOOGLE:
                continue
            kind = KINDS.get((place / "device").read_text().strip())
            handed = bool(accel) or (root / "dev/vfio" / (place / "iommu_group").readlink().name).exists()
        except OSError:
            continue  # a device that went away, or one without an IOMMU group: none that programs could use
        if kind is not None and handed:
            name, memory = kind
            found.append(DeviceDesc(name=name, index=len(found), memory=memory, pci=place.name))
    return found
