"""`conformance.toml`: what is wrong in it is told in one line, and what is right is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.testing.conformance.settings import read_settings, reason_for


def test_patterns_take_brackets_literally() -> None:
    patterns = {"test_x.py::*[a-b]": "why"}
    assert reason_for("test_x.py::test_y[a-b]", patterns) == ("test_x.py::*[a-b]", "why")
    assert reason_for("test_x.py::test_ya", patterns) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Invalid"),
        ("# \xff", "'utf-8' codec can't decode byte 0xff"),
        ("[tolerances]", "unknown section tolerances; known: tolerance, xfail, "),
        ("xfail = 3", "xfail must be a section, [xfail], not 3"),
        ('skip = "x"', "skip must be a section, [skip], not 'x'"),
        ("absent = 3", "absent must be a section, [absent], not 3"),
        ("proof = 3", "proof must be a section, [proof], not 3"),
        ("tolerance = 3", "tolerance must be a section, [tolerance], not 3"),
        ("max_seconds = []", "max_seconds must be a section, [max_seconds], not []"),
        ("[skip]\nx = 1", "skip.'x' needs a reason in words"),
        ('[xfail]\nx = ""', "xfail.'x' needs a reason in words"),
        ("[absent]\nX = 1", "absent.X must be text"),
        ('[proof]\nlabel = "trust me"', "it is one of: run on hardware, executed on simulator"),
        ('[proof]\nlevel = "gold"', "proof has a label and nothing else"),
        ('[max_seconds]\nprobe = "fast"', "max_seconds.probe must be a number above 0, not 'fast'"),
        ("[max_seconds]\ntest = true", "max_seconds.test must be a number above 0, not True"),
        ("[max_seconds]\nprove = 1", "max_seconds.prove limits nothing; known: probe, test"),
        ("[tolerance]\nlinear = 3", "tolerance.linear must be by dtype: linear.float32 = 3"),
        ("[tolerance]\nlinear.float32 = nan", "tolerance.linear.float32 must be a number above 0, not nan"),
        ("[tolerance]\nlinear.float23 = 1", "tolerance.linear.float23: of float32, bfloat16, float16"),
        (
            "[tolerance]\nrms_nrom.float32 = 1",
            "tolerance.'rms_nrom' is no op, kernel family or scheme of one; is it rms_norm",
        ),
        ('[tolerance]\n"linear-gguf:Q9".float32 = 1', "tolerance.'linear-gguf:Q9' is no op"),
    ],
)
def test_a_wrong_settings_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "conformance.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: ')}.*{re.escape(message)}.*$"):
        read_settings(path)


def test_tolerances_are_found_and_those_that_nobody_asked_for_are_known(tmp_path: Path) -> None:
    path = tmp_path / "conformance.toml"
    path.write_text('[tolerance]\nrms_norm.float32 = 1\nmoe.float16 = 2\n"linear-gguf:Q4_K".bfloat16 = 0.5\n')
    settings = read_settings(path)
    assert settings.error("rms_norm", "float32", 9.0) == 1
    assert settings.error("rms_norm", "float16", 9.0) == 9.0
    assert settings.error("linear-gguf:Q4_K", "bfloat16", 9.0) == 0.5
    assert settings.unused_tolerances() == ["moe.float16"]


def test_what_is_wrong_in_the_settings_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "conformance.toml"
    path.write_text('[xfail]\n"test_x" = 3\n')
    told = CliRunner().invoke(main, ["plugin", "check", "refdev", "--config", str(path)])
    assert (told.exit_code, told.output) == (1, f"Error: {path}: xfail.'test_x' needs a reason in words\n")
