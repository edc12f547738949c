"""A card that tests of attention may pretend to have, and a kind of attention to ask of it."""

from __future__ import annotations

from typing import Any

from octavo.plugin import AttentionSpec, MemInfo
from octavo.plugin.torch import TorchDevice


class Hopper(TorchDevice):
    """The host, as if it were a Hopper card, or one of another capability."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))
        self.capability = capability


def spec(**changes: Any) -> AttentionSpec:
    fields = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "scale": 0.125,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_size": 16,
    }
    return AttentionSpec(**(fields | changes))
