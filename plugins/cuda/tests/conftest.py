"""Triton's kernels are interpreted where there is no card: decided here, before any test imports them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
