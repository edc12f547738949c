"""Compiles acme.c into acme.so beside it: `python build.py`, or `hatch_build.py` when the package is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("acme.c")
LIBRARY = Path(__file__).with_name("acme.so")
FLAGS = ("-O2", "-ftree-vectorize", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared", "-Wall", "-Werror")


def build() -> None:
    """Wants a C compiler: $CC, or cc. Raises SystemExit that says what failed."""
    command = [os.environ.get("CC", "cc"), *FLAGS, str(SOURCE), "-o", str(LIBRARY), "-lm"]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"octavo-acme-full needs a C compiler: {' '.join(command)}: {error}") from error


if __name__ == "__main__":
    build()
