"""The report as a page for people: one HTML file that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

TIERS = {
    "0": "hygiene",
    "1": "device",
    "2": "ops",
    "3": "attention",
    "4": "linear layers and experts",
    "5": "ranks",
    "6": "engine",
}
OUTCOMES = ("passed", "failed", "xfailed", "skipped")


def page(data: Mapping[str, Any]) -> str:
    """HTML of a report (`Result.data`)."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["microseconds"] = microseconds
    return environment.get_template("page.html").render(
        {"classes": {}} | dict(data),  # reports of before it was told whose each class is
        badge=badge(data),
        rows=[(tier, TIERS.get(tier, ""), data["by_tier"].get(tier, {})) for tier in data["tiers"]],
        outcomes=OUTCOMES,
        reasons=Counter(data["skipped"].values()).most_common(),
    )


def badge(data: Mapping[str, Any]) -> str:
    """The level with what qualifies it: "silver · run on hardware · 2 known failures"."""
    parts = [data["level"], data["proof"] or "proof not labelled"]
    known = len(data["xfails"])
    left_out = len(data["excused"])
    parts += [f"{known} known failure{'s' if known > 1 else ''}"] if known else []
    parts += [f"{left_out} test{'s' if left_out > 1 else ''} left out"] if left_out else []
    return " · ".join(parts)


def microseconds(seconds: float) -> str:
    """1.25e-5 -> "12.5"."""
    return f"{seconds * 1e6:,.1f}"
