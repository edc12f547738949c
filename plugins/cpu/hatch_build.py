"""Builds the C++ kernels when octavo-cpu is installed or packed into a wheel; OCTAVO_CPU_NATIVE=0 leaves them out.

Without a compiler everything still installs: the pure-torch tier runs, and `octavo explain` says why.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/octavo_cpu/kernels"


class KernelsHook(BuildHookInterface):
    """Runs `kernels/build.py` for wheels and editable installs; an sdist carries the sources alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" or "editable"."""
        if self.target_name != "wheel" or os.environ.get("OCTAVO_CPU_NATIVE") == "0":
            return
        path = Path(self.root) / KERNELS / "build.py"
        spec = importlib.util.spec_from_file_location("octavo_cpu_kernels_build", path)
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        built = build.build_or_say_why()
        # Ignored by git, and to be in the wheel all the same.
        build_data["artifacts"].append(f"{KERNELS}/{(build.LIBRARY if built else build.FAILURE).name}")
        if not built:
            self.app.display_warning(f"octavo-cpu without its compiled kernels: {build.FAILURE.read_text()}")
        elif version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """The library calls no Python, so that only the operating system and the architecture count."""
    from packaging.tags import sys_tags

    # The first tag is this machine's own ("linux_x86_64"): a release job's auditwheel turns it into manylinux.
    linux_first = [
        tag.platform for tag in sys_tags() if "linux_" not in tag.platform or tag.platform.startswith("linux_")
    ]
    return linux_first[0]
