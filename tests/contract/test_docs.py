"""Docs tell the truth: generated pages are fresh, links lead somewhere, examples are Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from octavo.testing.docs import PAGES

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md"))]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_generated_page_is_fresh(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run `make docs`"


def test_every_page_of_a_report_has_its_report() -> None:
    folder = ROOT / "docs" / "conformance"
    assert {path.stem for path in folder.glob("*.html")} == {path.stem for path in folder.glob("*.json")}


@pytest.mark.parametrize("page", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_examples_parse(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(block)


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:server|engine|runner|models|layers|plugin)/[\w/]+\.py)`", text)
    assert len(named) >= 7
    for path in named:
        assert (ROOT / "core" / "src" / "octavo" / path).exists(), path


def test_every_make_command_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {a or b for a, b in named} <= targets
