"""What results amount to: the level, what stands before the next one, and which kernels deserve a look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BRONZE = frozenset({"0", "1", "6"})
SILVER = BRONZE | {"2", "3", "4"}
GOLD = SILVER | {"5"}
NATIVE = {"attention": "3", "linear": "4"}
"""Kernel families that a silver platform brings itself -> the tier that tests them."""
NOTEWORTHY = 1.1
NO_DEVICE = "none: no device"


def level(data: dict[str, Any], tiers: Sequence[str]) -> str:
    """bronze: serves correctly on any kernels; silver: own attention and linear kernels, all kernels right; gold: also
    recorded steps and several ranks, and no test is excused. Without a device nothing is judged."""
    if data.get("no_device"):
        return NO_DEVICE
    if not set(tiers) >= BRONZE:
        return f"not judged (it takes tiers {', '.join(sorted(BRONZE))} at least)"
    # A tier of which nothing ran proves nothing.
    good = {
        tier for tier in tiers if (ran := data["by_tier"].get(tier)) and ran.get("passed") and not ran.get("failed")
    }
    claims = data["claims"]
    if not good >= BRONZE:
        return "none"
    if not (good >= SILVER and set(data["native"]) >= set(NATIVE)):
        return "bronze"
    whole = claims["graph"] != "none" and claims["max_world_size"] > 1 and not data["xfails"] and not data["excused"]
    return "gold" if good >= GOLD and whole else "silver"


def missing_for_next(data: Mapping[str, Any]) -> list[str]:
    """What stands between a platform and the next level, in words."""
    if data.get("no_device"):
        return [f"a device ({data['no_device']})"]
    rank = {"none": 0, "bronze": 1, "silver": 2, "gold": 3}.get(data["level"])
    if rank is None or rank == 3:
        return []
    wanted = (BRONZE, SILVER, GOLD)[rank]
    missing = [f"tier {tier} fails" for tier in sorted(wanted) if data["by_tier"].get(tier, {}).get("failed")]
    missing += [
        f"tier {tier} {'has nothing to run' if tier in data['tiers'] else 'was not asked for'}"
        for tier in sorted(wanted)
        if not data["by_tier"].get(tier, {}).get("passed") and not data["by_tier"].get(tier, {}).get("failed")
    ]
    if rank == 1:
        # Of a tier that was not asked for, it has just been said.
        asked = [family for family, tier in NATIVE.items() if tier in data["tiers"]]
        missing += [f"no {family} kernel of its own is proved" for family in asked if family not in data["native"]]
    if rank == 2:
        missing += ["no recorded steps (caps.graph)"] if data["claims"]["graph"] == "none" else []
        missing += ["one rank only (caps.max_world_size)"] if data["claims"]["max_world_size"] < 2 else []
        missing += [f"{len(data['xfails'])} known failures"] if data["xfails"] else []
        missing += [f"{len(data['excused'])} tests left out"] if data["excused"] else []
    return missing


def native(classes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Kernel families of which a class of the platform's own, not of a kernel pack, gave a right result. classes: as in
    the report, "attention-acme" -> {"pack", "proved"}."""
    return sorted({name.partition("-")[0] for name, its in classes.items() if its["proved"] and not its["pack"]})


def slower(timed: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the report's timings, the kernels that take noticeably longer than the reference, and those that failed."""
    return [entry for entry in timed if "error" in entry or entry["ratio"] > NOTEWORTHY]
