"""Triton kernels run interpreted here, which has to be said before any test imports the first of them."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
