"""Triton kernels on the CPU: interpreted, which has to be said before the first of them is imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
