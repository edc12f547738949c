"""The report page: whole, self-contained, and nothing in it is taken for markup."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from octavo.testing.conformance.page import badge, page

DATA: dict[str, Any] = {
    "platform": "acme",
    "plugin": "octavo-acme 0.1, plugin API 1.0",
    "plugin_api": "1.0",
    "device": "Acme One",
    "no_device": "",
    "level": "silver",
    "missing": ["one rank only (caps.max_world_size)"],
    "proof": "executed on simulator",
    "tiers": ["0", "4"],
    "by_tier": {"0": {"passed": 7}, "4": {"passed": 5, "failed": 1, "xfailed": 1, "skipped": 2}},
    "seconds": {"0": 3.5, "4": 1.25},
    "counts": {"passed": 12, "failed": 1},
    "failures": {"test_t4_linear.py::test_x[<b>]": "AssertionError: 3 < 4 & <script>alert(1)</script>"},
    "xfails": {"test_t4_linear.py::test_y": "no softcap before driver 5"},
    "excused": {"test_t4_linear.py::test_z": "takes an hour"},
    "skipped": {"a": "refuses gguf:IQ1_S", "b": "refuses gguf:IQ1_S"},
    "claims": {"dtypes": ["float32", "bfloat16"], "graph": "none", "max_world_size": 1},
    "native": ["linear"],
    "native_ops": ["rms_norm"],
    "op_coverage": 50.0,
    "ops": {"rms_norm": "acme", "rope": ""},
    "timings": [
        {"op": "rms_norm", "provider": "acme", "seconds": 1.25e-5, "reference": 2.5e-5, "ratio": 0.5},
        {"op": "linear", "provider": "acme", "error": "ValueError: no such stream"},
    ],
    "slower_than_reference": [],
    "tolerances": {"rms_norm": {"bfloat16": 3e-2}},
    "unused_patterns": ["test_t9*"],
}


class Reader(HTMLParser):
    """Text and tags of a page; unclosed elements are left in `open`."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def read() -> Reader:
    reader = Reader()
    reader.feed(page(DATA))
    reader.close()
    return reader


def test_the_page_is_well_formed_and_needs_nothing_else(read: Reader) -> None:
    assert read.open == []
    assert read.links == []
    assert "script" not in read.tags


@pytest.mark.parametrize(
    "text",
    [
        "silver · executed on simulator · 1 known failure · 1 test left out",
        "octavo-acme 0.1, plugin API 1.0; on Acme One",
        "one rank only (caps.max_world_size)",
        "4 linear layers and experts",
        "3 < 4 & <script>alert(1)</script>",
        "no softcap before driver 5",
        "takes an hour",
        "float32, bfloat16",
        "12.5",
        "25.0",
        "0.50",
        "ValueError: no such stream",
        "50% with a kernel of its own",
        "0.03",
        "refuses gguf:IQ1_S",
        "test_t9*",
    ],
)
def test_the_page_says(read: Reader, text: str) -> None:
    assert text in read.text


def test_a_platform_that_cannot_be_opened_has_a_page_too() -> None:
    broken = {
        "plugin": "",
        "device": "",
        "claims": {},
        "ops": {},
        "timings": [],
        "native": [],
        "proof": "",
        "seconds": {},
    }
    text = page(DATA | broken | {"level": "not judged (it takes tiers 0, 1, 6 at least)", "by_tier": {}})
    assert "The plugin could not be opened." in text
    assert 'class="badge not"' in text


def test_the_badge_is_the_level_and_its_proof() -> None:
    plain = DATA | {"xfails": {}, "excused": {}}
    assert badge(plain) == "silver · executed on simulator"
    assert badge(plain | {"proof": "", "level": "gold"}) == "gold · proof not labelled"
