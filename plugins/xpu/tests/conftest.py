"""The simulated device. A test that needs the simulator fails where there is none."""

from __future__ import annotations

import pytest

from octavo_xpu import simulated
from octavo_xpu.device import SyclDevice
from octavo_xpu.native import Runtime


@pytest.fixture(scope="session")
def device() -> SyclDevice:
    """Intel's OpenCL CPU device, with its matrix units emulated. Skipping where it is missing would hide that no kernel
    ran."""
    probe = simulated.platform_probe()
    assert probe.available, f"the simulator is missing: {probe.reason}"
    return simulated.device()


@pytest.fixture(scope="session")
def plain_device(device: SyclDevice) -> SyclDevice:
    """The same device as a GPU without matrix units."""
    plain = SyclDevice("cpu", memory=device.memory)
    plain.runtime = Runtime(device.runtime.queue, wait=True)
    assert not plain.runtime.matrix("bfloat16")
    return plain
