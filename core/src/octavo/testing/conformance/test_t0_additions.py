"""Tier 0: what other packages add to the platform, in the environment under test, can be used.

A start leaves a broken kernel pack out with a warning, and fails only if its kernels are asked for; here it is a
failure, named. A pack that cannot be imported does not say whom it is for: it counts for every platform.
"""

from __future__ import annotations

import pytest

from octavo.active_platform import kernel_packs
from octavo.extensions import load_extensions
from octavo.testing.conformance.subject import Subject


@pytest.mark.no_device
def test_every_kernel_pack_for_the_platform_can_be_opened(subject: Subject) -> None:
    broken = kernel_packs(subject.name)[1]
    assert not broken, "; ".join(broken)


def test_every_kernel_pack_for_the_platform_registers_its_kernels(subject: Subject) -> None:
    known = kernel_packs(subject.name)[1]
    broken = [reason for reason in subject.kernels.broken_packs if reason not in known]
    assert not broken, "; ".join(broken)


@pytest.mark.no_device
def test_every_extension_registers(subject: Subject) -> None:
    load_extensions(subject.platform)
