"""`conformance.toml`: what a vendor says about its own results.

[tolerance]
rms_norm.bfloat16 = 3e-2          # op, or "linear" / "moe" / "attention", by dtype: replaces the catalogue's
"linear-gguf:Q4_K".float32 = 1e-3 # of one quantization scheme only, by its packing

[xfail]                           # known failures, by test id (wildcards allowed); shown in the report
"test_t3_attention.py::*softcap*" = "no softcap before driver 5"

[skip]
"test_t6_engine.py::*" = "needs more memory than the test board has"

[max_seconds]
probe = 2.0

[absent]                          # environment variables with which the plugin does not find its hardware
ACME_DEVICE = "/nonexistent"

[proof]                           # where the results come from; shown in the report
label = "run on hardware"         # or "executed on simulator", "compiled for target", "contract only"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

SECTIONS = ("tolerance", "xfail", "skip", "max_seconds", "absent", "proof")
LABELS = ("run on hardware", "executed on simulator", "compiled for target", "contract only")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The file's sections. Patterns map to reasons."""

    tolerance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    xfail: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    max_seconds: Mapping[str, float] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    proof: Mapping[str, str] = field(default_factory=dict)

    def error(self, what: str, dtype: str, default: float) -> float:
        """The error allowed for an op or kernel family in a dtype."""
        return self.tolerance.get(what, {}).get(dtype, default)


def read_settings(path: Path | None) -> Settings:
    """Read the file; None gives the defaults. Raises ConfigError naming what is wrong in it."""
    if path is None:
        return Settings()
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if unknown := sorted(set(data) - set(SECTIONS)):
        raise ConfigError(f"{path}: unknown section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    for section in ("xfail", "skip"):
        for pattern, reason in data.get(section, {}).items():
            if not isinstance(reason, str) or not reason:
                raise ConfigError(f"{path}: {section}.{pattern!r} needs a reason in words")
    for variable, value in data.get("absent", {}).items():
        if not isinstance(value, str):
            raise ConfigError(f"{path}: absent.{variable} must be text, as it goes into the environment")
    proof = data.get("proof", {})
    if set(proof) - {"label"} or proof.get("label", LABELS[0]) not in LABELS:
        raise ConfigError(f"{path}: proof has a label and nothing else; it is one of: {', '.join(LABELS)}")
    return Settings(**data)


def reason_for(test: str, patterns: Mapping[str, str]) -> tuple[str, str] | None:
    """(pattern, reason) of the first pattern that fits a test id. Brackets are literal, * and ? are wildcards."""
    for pattern, reason in patterns.items():
        if fnmatchcase(test, pattern.replace("[", "[[]")):
            return pattern, reason
    return None
