"""A platform's kernels count where they gave right results; those of kernel packs are the packs'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.testing.conformance.levels import level, missing_for_next, native
from octavo.testing.conformance.run import Result, merged

Check = Callable[..., Result]

LAZY = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32")

@hookimpl
def register_kernels(registry):
    from octavo.plugin import no
    from octavo.testing.refdev_kernels import RefAttention

    class LazyAttention(RefAttention):
        name = "lazy"
        @classmethod
        def supports(cls, spec, device):
            return no("not today")

    class LazyLinear:
        name = "lazy"
        @classmethod
        def supports(cls, spec, device):
            return no("not today")

    registry.attention(LazyAttention)
    registry.linear(LazyLinear)
"""

PACK = """
from octavo.plugin import hookimpl
API, PLATFORMS = "1.0", {"bad"}

@hookimpl
def register_kernels(registry):
    from octavo.testing.refdev_kernels import RefAttention, rms_norm

    class Lent(RefAttention):
        name = "lent"

    registry.attention(Lent)
    registry.op("rms_norm", rms_norm, provider="lent")
"""

SKIP = """
[skip]
"*-reference*" = "not what this is about"
"""
ELSEWHERE = """
[elsewhere]
attention-lazy = "cards that work on Mondays"
linear-lazy = "cards that work on Mondays"
attention-lasy = "cards that nobody has"
"""


@pytest.fixture
def pack(tmp_path: Path) -> None:
    """The kernel pack, installed for the platform "bad"."""
    (tmp_path / "lending.py").write_text(PACK)
    info = tmp_path / "octavo_lent-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo-lent\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[octavo.kernels]\nlent = lending\n")


@pytest.mark.slow
@pytest.mark.usefixtures("pack")
def test_neither_kernels_that_refuse_everything_nor_those_of_a_pack_are_the_platforms(check: Check) -> None:
    result = check(
        LAZY, tiers="3,4", settings=ELSEWHERE.split("[skip]")[0].replace("[elsewhere]", "[skip]\n'*-refe*'='x'")
    )
    found = {test.partition("::")[2]: message for test, message in result.data["failures"].items()}
    assert set(found) == {
        "test_an_attention_class_is_good_for_something[attention-lazy]",
        "test_a_linear_class_is_good_for_something[linear-lazy]",
    }
    assert all("[elsewhere]" in message and message.endswith("It says: not today") for message in found.values())


@pytest.mark.slow
@pytest.mark.usefixtures("pack")
def test_a_class_for_other_devices_is_excused_by_name_and_proves_nothing_here(check: Check) -> None:
    result = check(LAZY, tiers="2,3,4", settings=SKIP + ELSEWHERE)
    data = result.data
    assert data["failures"] == {}
    assert data["native"] == []
    assert data["native_ops"] == []
    assert data["ops"]["rms_norm"] == "lent (kernel pack lent)"
    assert data["classes"] == {
        "attention-lent": {"pack": "lent", "proved": True},
        "attention-lazy": {"pack": "", "proved": False},
        "linear-lazy": {"pack": "", "proved": False},
    }
    assert "not for this device: cards that work on Mondays" in data["skipped"].values()
    assert data["unused_patterns"] == ["attention-lasy"]
    assert {(entry["op"], entry["provider"], entry["pack"]) for entry in data["timings"]} == {
        ("attention", "lent", "lent"),
        ("rms_norm", "lent", "lent"),
    }
    assert "own kernels: none proved (0% of the ops)\nof kernel packs: attention-lent (lent)" in result.summary()


CLASSES: dict[str, dict[str, Any]] = {
    "attention-lent": {"pack": "lent", "proved": True},
    "linear-own_one": {"pack": "", "proved": True},
    "moe-own": {"pack": "", "proved": False},
}


def test_only_own_classes_that_were_right_make_a_family_native() -> None:
    assert native(CLASSES) == ["linear"]
    assert native({**CLASSES, "attention-own": {"pack": "", "proved": True}}) == ["attention", "linear"]


def test_what_one_process_proved_is_proved() -> None:
    def report(**proved: bool) -> dict[str, Any]:
        lists = ("changed_by_backend", "unused_patterns", "timings")
        counts = ("counts", "by_tier", "seconds", "failures", "xfails", "excused", "skipped")
        classes = {name: its | {"proved": proved.get(name.partition("-")[0], False)} for name, its in CLASSES.items()}
        return {"classes": classes, **{name: [] for name in lists}, **{name: {} for name in counts}}

    data = merged([report(), report(linear=True), report(attention=True), report()])
    assert data["native"] == ["linear"]
    assert [its["proved"] for its in data["classes"].values()] == [True, True, False]


def test_a_family_that_was_not_asked_for_is_not_called_missing() -> None:
    data: dict[str, Any] = {"native": [], "claims": {}, "xfails": {}, "excused": {}}
    data["by_tier"] = {tier: {"passed": 1} for tier in "01346"}
    for tiers, last in (("013", []), ("016", []), ("0136", ["attention"]), ("01346", ["attention", "linear"])):
        asked = list(tiers)
        missing = missing_for_next({**data, "tiers": asked, "level": level(data, asked)})
        assert [line for line in missing if "kernel" in line] == [
            f"no {one} kernel of its own is proved" for one in last
        ]
