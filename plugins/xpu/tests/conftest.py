"""The simulated device. A test that needs the simulator fails where there is none."""

from __future__ import annotations

import pytest

from octavo_xpu import simulated
from octavo_xpu.device import SyclDevice


@pytest.fixture(scope="session")
def device() -> SyclDevice:
    """Intel's OpenCL CPU device. Skipping where it is missing would hide that no kernel ran."""
    probe = simulated.platform_probe()
    assert probe.available, f"the simulator is missing: {probe.reason}"
    return simulated.device()
