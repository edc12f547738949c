"""Compiles the C kernels when the package is installed or packed into a wheel."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

KERNELS = "src/octavo_acme_full/kernels"


class KernelsHook(BuildHookInterface):
    """An sdist carries the source alone; wheels and editable installs get the library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        runpy.run_path(str(Path(self.root, KERNELS, "build.py")), run_name="__main__")
        # Ignored by git, and to be in the wheel all the same.
        build_data["artifacts"].append(f"{KERNELS}/acme.so")
        # The library calls no Python: only the operating system and the architecture count.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{next(tag for tag in platform_tags() if not tag.startswith('manylinux'))}"
