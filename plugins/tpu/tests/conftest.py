"""What must be so before torch is imported, and the simulator on which tests execute. Without it they fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.path.insert(0, str(Path(__file__).parent))  # the platform `xla_cpu`, by its name


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:<TorchTpu")
    config.addinivalue_line("filterwarnings", "ignore:.*LeafSpec:FutureWarning")  # torch, of its own cache of programs


@pytest.fixture
def tpu_on_cpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the platform that executes on the CPU what a TPU would."""
    import xla_cpu

    assert xla_cpu.platform_probe().available, xla_cpu.platform_probe().reason
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "tpu_on_cpu=xla_cpu")
    return "tpu_on_cpu"


@pytest.fixture(params=["cpu", "tpu"])
def place(request: pytest.FixtureRequest) -> str:
    """Where tensors lie: plain torch, or torch_tpu executed by XLA:CPU."""
    if request.param == "tpu":
        import xla_cpu

        xla_cpu.start()
    return str(request.param)
