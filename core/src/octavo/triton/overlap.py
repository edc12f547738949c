"""Starting a kernel while the one before it still runs, where a device can.

A kernel usually starts when the one before it has ended, and the device idles for about a microsecond in between. With
an `Overlap` it starts early: what lies before `START()` in it runs meanwhile. That may read what no kernel of a step
writes (weights, tables), and nothing else; every program of the kernel has to call `START()` once, before it returns.

    weights = tl.load(...)      # constant
    START()                     # here the kernel before has ended and its writes are visible
    x = tl.load(...)            # the result of the kernel before
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl  # noqa: F401  (the interpreter wants to see it beside every device function)


@triton.jit
def start_in_order():
    """The device already started this kernel after the one before had ended."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A platform's way to start early. start: a device function without arguments; options: of the launch."""

    start: Any = start_in_order
    options: Mapping[str, Any] = field(default_factory=dict)


IN_ORDER = Overlap()
"""No overlap: for devices that have none, and for the interpreter."""
