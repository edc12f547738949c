"""`octavo plugin list` and `octavo explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli import main
from octavo.cli.table import columns, size
from octavo.testing.refdev_kernels import RefAttention
from octavo.testing.tiny import make_model


@pytest.fixture(autouse=True)
def extra_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "crashing_platform.py").write_text("raise OSError('libacme.so: not found')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev,acme=crashing_platform")


def test_list_shows_every_platform_and_why_one_is_broken() -> None:
    result = CliRunner().invoke(main, ["plugin", "list"])
    assert result.exit_code == 0
    lines = {line.split()[1]: line for line in result.output.splitlines()}
    assert set(lines) >= {"NAME", "acme", "cpu", "refdev"}
    assert lines["cpu"].startswith("platform")
    assert "broken" in lines["acme"]
    assert "libacme.so: not found" in lines["acme"]
    assert "octavo-cpu" in lines["cpu"]
    assert "ready" in lines["cpu"]
    assert "reference device (1.0 GiB)" in lines["refdev"]


def test_an_error_of_several_lines_keeps_to_its_row(tmp_path: Path) -> None:
    (tmp_path / "crashing_platform.py").write_text(
        "raise ImportError('libacme.so:\\n  undefined symbol\\n\\nsee\\tldd')"
    )
    lines = CliRunner().invoke(main, ["plugin", "list"]).output.splitlines()
    assert len(lines) == 1 + len(json.loads(CliRunner().invoke(main, ["plugin", "list", "--json"]).output))
    [row] = [line for line in lines if line.split()[1] == "acme"]
    assert "raised ImportError: libacme.so: undefined symbol see ldd; reinstall" in row


def test_list_as_json() -> None:
    result = CliRunner().invoke(main, ["plugin", "list", "--json"])
    reports = {report["name"]: report for report in json.loads(result.output)}
    assert reports["cpu"]["state"] == "ready"
    assert reports["cpu"]["device_type"] == "cpu"
    assert reports["acme"]["state"] == "broken"
    assert reports["refdev"]["devices"][0]["memory"] == 1 << 30


def installed(folder: Path, name: str, source: str, group: str) -> None:
    """A distribution `octavo-NAME` whose module has this source."""
    (folder / f"{name}_module.py").write_text(source)
    info = folder / f"octavo_{name}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: octavo-{name}\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}_module\n")


PACK = """from octavo.plugin import hookimpl
API, PLATFORMS = "{api}", {{"refdev", "cpu"}}
@hookimpl
def register_kernels(registry): ...
"""
EXTENSION = """from octavo.plugin import hookimpl
@hookimpl
def register_extensions(registry): registry.model("{model}", "mine:Model")
"""


def test_list_shows_kernel_packs_and_extensions_too(tmp_path: Path) -> None:
    kernels, extensions = "octavo.kernels", "octavo.extensions"
    installed(tmp_path, "goodpack", PACK.format(api="1.0"), kernels)
    installed(tmp_path, "oldpack", PACK.format(api="7.0"), kernels)
    installed(tmp_path, "lostpack", "import a_library_that_is_not_there", kernels)
    installed(tmp_path, "goodmodel", EXTENSION.format(model="mine"), extensions)
    installed(tmp_path, "takenmodel", EXTENSION.format(model="llama"), extensions)
    result = CliRunner().invoke(main, ["plugin", "list", "--json"])
    assert result.exit_code == 0, result.output
    reports = {report["name"]: report for report in json.loads(result.output)}
    assert {name: (r["kind"], r["state"]) for name, r in reports.items() if r["version"] == "0.3"} == {
        "goodpack": ("kernels", "ready"),
        "oldpack": ("kernels", "incompatible"),
        "lostpack": ("kernels", "broken"),
        "goodmodel": ("extension", "ready"),
        "takenmodel": ("extension", "broken"),
    }
    assert reports["goodpack"]["platforms"] == ["cpu", "refdev"]
    assert reports["oldpack"]["dist"] == "octavo-oldpack"
    lines = {line.split()[1]: line for line in CliRunner().invoke(main, ["plugin", "list"]).output.splitlines()}
    assert "for cpu, refdev" in lines["goodpack"]
    assert "plugin API 7.0" in lines["oldpack"]
    assert "a_library_that_is_not_there" in lines["lostpack"]
    assert "'llama' is registered twice" in lines["takenmodel"]


def test_explain_shows_kernels_memory_and_limits(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gemma2", tokenizer=False)
    flags = [str(folder), "--platform", "refdev", "--num-kv-blocks", "40", "--skip-tokenizer-init", "--enforce-eager"]
    result = CliRunner().invoke(main, ["explain", "--json", *flags])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    providers = {kernel["op"]: kernel["provider"] for kernel in facts["kernels"]}
    assert providers["attention"] == "refdev"
    assert providers["rms_norm"] == "refdev"
    assert providers["linear"] == "reference"
    assert [group["kind"] for group in facts["kv"]["groups"]] == ["sliding", "full"]
    assert facts["limits"]["max_num_seqs"] == 16

    result = CliRunner().invoke(main, ["explain", *flags, "--kernel", "rms_norm=reference"])
    [line] = [line for line in result.stdout.splitlines() if line.startswith("rms_norm ")]
    assert "reference" in line
    assert "refdev: --kernel rms_norm=reference" in line
    assert "KV memory: " in result.stdout
    assert "max_model_len" in result.stdout


def test_explain_shows_what_a_kernel_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RefAttention, "why", "the one that was faster", raising=False)
    folder = make_model(tmp_path / "model", "llama", tokenizer=False)
    flags = [str(folder), "--platform", "refdev", "--num-kv-blocks", "40", "--skip-tokenizer-init", "--enforce-eager"]
    result = CliRunner().invoke(main, ["explain", *flags])
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stdout.splitlines() if line.endswith("the one that was faster")]
    assert line.startswith("attention refdev (")


def test_columns_align_and_the_last_runs_free() -> None:
    assert columns(("A", "B"), [("long", "x y"), ("s", "")]) == "A     B\nlong  x y\ns"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 42, "4.0 TiB")]
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
