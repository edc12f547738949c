"""Triton's kernels are interpreted where there is no card, and tests share their helpers: decided before any import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
