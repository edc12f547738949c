"""Octavo: an LLM inference and serving engine built as a hardware-plugin framework.

Importing `octavo` imports neither torch nor a platform: names are resolved when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.beam_search import BeamSearchParams
    from octavo.errors import OctavoError
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.structured.spec import StructuredOutputs

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "SamplingParams": "octavo.sampling.params",
    "StructuredOutputs": "octavo.structured.spec",
    "BeamSearchParams": "octavo.beam_search",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
    "OctavoError": "octavo.errors",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
