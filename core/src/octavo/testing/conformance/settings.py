"""`conformance.toml`: what a vendor says about its own results.

[tolerance]
rms_norm.bfloat16 = 3e-2          # op, or "linear" / "moe" / "attention", by dtype: replaces the catalogue's
"linear-gguf:Q4_K".float32 = 1e-3 # of one quantization scheme only, by its packing

[xfail]                           # known failures, by test id (wildcards allowed); shown in the report
"test_t3_attention.py::*softcap*" = "no softcap before driver 5"

[skip]
"test_t6_engine.py::*" = "needs more memory than the test board has"

[max_seconds]
probe = 2.0                       # import and probe together; by default 1
test = 900                        # any one test, or the timing of kernels: then it hangs; by default 600

[absent]                          # environment variables with which the plugin does not find its hardware
ACME_DEVICE = "/nonexistent"

[elsewhere]                       # kernel classes that may refuse every case, as what they want is not here
attention-acme2 = "cards of the second generation"

[proof]                           # where the results come from; shown in the report
label = "run on hardware"         # or "executed on simulator", "compiled for target", "contract only"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

LIMITS = {"probe": 1.0, "test": 600.0}
"""Keys of [max_seconds], and what holds without them."""
LABELS = ("run on hardware", "executed on simulator", "compiled for target", "contract only")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The file's sections. Patterns map to reasons."""

    tolerance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    xfail: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    max_seconds: Mapping[str, float] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    proof: Mapping[str, str] = field(default_factory=dict)

    used: set[str] = field(default_factory=set, init=False)
    """The tolerances that were asked for: "rms_norm.bfloat16"."""

    def error(self, what: str, dtype: str, default: float) -> float:
        """The error allowed for an op or kernel family in a dtype."""
        self.used.add(f"{what}.{dtype}")
        return self.tolerance.get(what, {}).get(dtype, default)

    def unused_tolerances(self) -> list[str]:
        """Those that no test asked for."""
        named = [f"{what}.{dtype}" for what, by_dtype in self.tolerance.items() for dtype in by_dtype]
        return [name for name in named if name not in self.used]

    def limit(self, what: str) -> float:
        """Seconds that "probe" or "test" may take."""
        return self.max_seconds.get(what, LIMITS[what])


SECTIONS = tuple(section.name for section in fields(Settings) if section.init)


def read_settings(path: Path | None) -> Settings:
    """Read the file; None gives the defaults. Raises ConfigError naming what is wrong in it."""
    if path is None:
        return Settings()
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        check(data)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return Settings(**data)


def check(data: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line that names the key, if a section does not hold what it should."""
    if unknown := sorted(set(data) - set(SECTIONS)):
        raise ValueError(f"unknown section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    for section, entries in data.items():
        if not isinstance(entries, dict):
            raise ValueError(f"{section} must be a section, [{section}], not {entries!r}")
    for section in ("xfail", "skip", "elsewhere"):
        for pattern, reason in data.get(section, {}).items():
            if not isinstance(reason, str) or not reason:
                raise ValueError(f"{section}.{pattern!r} needs a reason in words")
    for key, seconds in data.get("max_seconds", {}).items():
        if key not in LIMITS:
            raise ValueError(f"max_seconds.{key} limits nothing; known: {', '.join(LIMITS)}")
        check_number(f"max_seconds.{key}", seconds)
    for variable, value in data.get("absent", {}).items():
        if not isinstance(value, str):
            raise ValueError(f"absent.{variable} must be text, as it goes into the environment")
    proof = data.get("proof", {})
    if set(proof) - {"label"} or proof.get("label", LABELS[0]) not in LABELS:
        raise ValueError(f"proof has a label and nothing else; it is one of: {', '.join(LABELS)}")
    check_tolerances(data.get("tolerance", {}))


def check_tolerances(tolerance: Mapping[str, Any]) -> None:
    """Raise ValueError for what no test can ask for."""
    if not tolerance:
        return
    # Here, as these import torch.
    import octavo.ops  # noqa: F401  (fills the catalogue)
    from octavo.ops.catalogue import CATALOGUE, DEFAULT_TOLERANCE
    from octavo.testing.conformance.schemes import SCHEMES

    products = ("linear", "moe")
    known = {*CATALOGUE, "attention", *products, *(f"{what}-{packing}" for what in products for packing in SCHEMES)}
    for what, by_dtype in tolerance.items():
        if what not in known:
            near = get_close_matches(what, known)
            raise ValueError(
                f"tolerance.{what!r} is no op, kernel family or scheme of one"
                + (f"; is it {' or '.join(near)}?" if near else "")
            )
        if not isinstance(by_dtype, dict):
            raise ValueError(f"tolerance.{what} must be by dtype: {what}.float32 = {by_dtype!r}")
        for dtype, value in by_dtype.items():
            if dtype not in DEFAULT_TOLERANCE:
                raise ValueError(f"tolerance.{what}.{dtype}: of {', '.join(DEFAULT_TOLERANCE)}")
            check_number(f"tolerance.{what}.{dtype}", value)


def check_number(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{key} must be a number above 0, not {value!r}")


def reason_for(test: str, patterns: Mapping[str, str]) -> tuple[str, str] | None:
    """(pattern, reason) of the first pattern that fits a test id. Brackets are literal, * and ? are wildcards."""
    for pattern, reason in patterns.items():
        if fnmatchcase(test, pattern.replace("[", "[[]")):
            return pattern, reason
    return None
