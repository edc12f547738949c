"""The modules that need no browser, by Node's own test runner: markdown, events, requests, schemas, figures."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "js"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.test.mjs")), ids=lambda path: path.name)
def test_modules_pass_the_tests_of_node(file):
    node = shutil.which("node")
    assert node, "the page's modules are tested by Node.js 20 or newer"
    done = subprocess.run([node, "--test", str(file)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
