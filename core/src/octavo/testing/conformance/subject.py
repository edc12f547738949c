"""The platform under test, opened piece by piece, and the cases that follow from what it brings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

from octavo.active_platform import ActivePlatform
from octavo.config import EngineConfig, make_config
from octavo.discovery import installed, select
from octavo.errors import OctavoError, PlatformBrokenError, PlatformNotFoundError
from octavo.ops.bind import REFERENCE, KernelTable
from octavo.plugin import Device, PlatformCaps
from octavo.testing.conformance.settings import Settings

ENVIRONMENT = dict(os.environ)
"""As it was before any plugin was imported here: what fresh processes start with."""


FAMILIES = ("attention", "linear", "moe")
"""What kernel classes are registered for."""


@dataclass(frozen=True)
class Kernel:
    """One implementation to test. what: an op, "linear", "moe" or "attention"; fn: the function or the kernel class.

    pack: name of the kernel pack that brought it; empty for the platform's own, and for the reference.
    """

    what: str
    provider: str
    fn: Any
    inplace: bool = False
    graph_safe: bool = True
    pack: str = ""

    def __str__(self) -> str:
        return f"{self.what}-{self.provider}"


def absence(name: str) -> str:
    """What an installed platform says of hardware that it does not find; empty if it is here, or there is no saying."""
    try:
        probe = installed(name)._plugin.probe()
    except OctavoError:
        return ""
    return "" if probe.available else probe.reason or "it gives no reason"


def nothing_to_check(name: str, *, no_device: bool) -> str:
    """Why the kit does not begin: no such platform is installed, or its hardware is not here; empty if it does.

    A platform that is broken is checked, and its tests say what is wrong with it.
    """
    try:
        installed(name)
    except PlatformNotFoundError as error:
        return str(error)
    except OctavoError:
        return ""
    if no_device or not (reason := absence(name)):
        return ""
    return f"platform {name!r} finds no hardware: {reason}. Nothing was checked; --no-device checks what needs none"


def needs_device(subject: Subject) -> str:
    """Why a test is skipped that a platform without its device cannot take."""
    return f"needs a device: {subject.without_device}"


class Subject:
    """Everything is made at first use; what the platform raises reaches the test that asked.

    no_device: its hardware is not asked for, and no test may use `device` or what follows from it.
    changed_by_backend: names in torch, as tier 0 finds them.
    proved: the kernel classes of which a case came out right.
    unusable: how an earlier process ended when it made the device; it is not made again.
    """

    def __init__(self, name: str, settings: Settings, *, no_device: bool = False) -> None:
        self.name, self.settings, self.no_device = name, settings, no_device
        self.changed_by_backend: list[str] = []
        self.proved: set[str] = set()
        self.unusable = ""

    @cached_property
    def platform(self) -> ActivePlatform:
        return installed(self.name) if self.no_device else select(self.name)

    @cached_property
    def without_device(self) -> str:
        """Why nothing runs on the device; empty if it is used."""
        return (absence(self.name) or "left out as asked") if self.no_device else ""

    @property
    def caps(self) -> PlatformCaps:
        return self.platform.caps

    @cached_property
    def config(self) -> EngineConfig:
        return self.platform.configure(make_config(platform=self.name))[0]

    @cached_property
    def device(self) -> Device:
        if self.unusable:
            raise PlatformBrokenError(self.unusable, platform=self.name)
        device = self.platform.make_device(0, self.config)
        device.activate()
        return device

    @cached_property
    def kernels(self) -> KernelTable:
        import octavo.ops  # noqa: F401  (fills the catalogue)

        table = KernelTable()
        self.platform.register_kernels(table, self.device)
        return table

    def ops(self) -> Iterator[Kernel]:
        """Every registered op kernel, and every reference."""
        from octavo.ops.catalogue import CATALOGUE

        table = self.kernels
        for name, definition in CATALOGUE.items():
            for entry in table.providers(name):
                pack = next((pack for pack, its in table.packs.items() if entry in its.providers(name)), "")
                yield Kernel(name, entry.provider, entry.fn, entry.inplace, entry.graph_safe, pack)
            yield Kernel(name, REFERENCE, definition)

    def classes(self, family: str) -> Iterator[Kernel]:
        """Every registered kernel class of a family, and the reference."""
        from octavo.ops.attention import ReferenceAttention
        from octavo.ops.linear import ReferenceLinear
        from octavo.ops.moe import ReferenceMoE

        reference: dict[str, Any] = {
            "attention": ReferenceAttention,
            "linear": ReferenceLinear,
            "moe": ReferenceMoE,
        }
        table = self.kernels
        for cls in table.classes(family):
            pack = next((pack for pack, its in table.packs.items() if cls in its.classes(family)), "")
            yield Kernel(family, cls.name, cls, pack=pack)
        yield Kernel(family, REFERENCE, reference[family])


def check_usefulness(subject: Subject, kernel: Kernel, specs: Iterable[Any]) -> None:
    """Fail for a class of the platform's own that refuses every spec, unless conformance.toml says where it works."""
    if kernel.pack:
        pytest.skip(f"the kernel pack {kernel.pack} brings it, and may be made for other devices")
    reasons = []
    for spec in specs:
        answer = kernel.fn.supports(spec, subject.device)
        if answer.ok:
            return
        assert answer.reason, "a refusal must carry a reason"
        reasons.append(answer.reason)
    if where := subject.settings.elsewhere.get(str(kernel)):
        pytest.skip(f"not for this device: {where}")
    said = "; ".join(dict.fromkeys(reasons))
    pytest.fail(
        f"refuses every case; name it in [elsewhere] of conformance.toml if it is for other devices. It says: {said}"
    )
