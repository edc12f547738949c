"""The runtime torch_xla, executed on the CPU. Tests fail where it is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PLATFORMS = "tpu_xla_on_cpu=torch_xla_cpu,refdev=octavo.testing.refdev"

sys.path.insert(0, str(FOLDER))  # the platform `torch_xla_cpu`, by its name
os.environ["PJRT_DEVICE"] = "CPU"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:.*LeafSpec:FutureWarning")  # torch, of its own pytrees
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:torch_xla.*")


@pytest.fixture
def tpu_xla_on_cpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the platform. `refdev`, core's reference, is beside it."""
    import torch_xla_cpu

    assert torch_xla_cpu.platform_probe().available, torch_xla_cpu.platform_probe().reason
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", PLATFORMS)
    return "tpu_xla_on_cpu"
