"""docs/writing-a-plugin.md, from an empty folder to silver: all its blocks, in an empty environment with the wheels.

The files of the page are tried in this environment too, which takes seconds.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tutorial import Command, File, Shell, fits, steps

from octavo import LLM, SamplingParams
from octavo.cli.plugin_new import scaffold
from octavo.testing.tiny import make_model

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PORT = "8000"
"""The port of the page: a free one takes its place."""

PROMPTS = [[17, 40, 3], list(range(20, 60)), [5] * 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_every_block_of_the_tutorial_does_what_the_page_says(tmp_path: Path) -> None:
    assert list(DIST.glob("octavo-*.whl")), "run `make dist` first"
    port = free_port()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_", "PYTHON", "VIRTUAL_ENV"))}
    own = {
        "OCTAVO_PORT": port,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "PIP_FIND_LINKS": f"{DIST} {kept.get('PIP_FIND_LINKS', '')}".strip(),
        "PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_COMPILE": "0",  # most modules of what is installed are never imported
    }
    shell = Shell(tmp_path, kept | own)
    try:
        for step in steps():
            if isinstance(step, File):
                step.apply(shell.folder())
            else:
                shell.run(replace(step, line=step.line.replace(PORT, port), printed=ported(step, port)))
    finally:
        shell.close()


def ported(step: Command, port: str) -> list[str]:
    return [line.replace(PORT, port) for line in step.printed]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_files_of_the_page_make_a_platform_that_serves_by_its_own_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scaffold("demo", tmp_path)
    compilers = [step for step in steps() if isinstance(step, Command) and step.line.startswith("cc ")]
    for step in steps():
        if isinstance(step, File):
            step.apply(folder)
    subprocess.run(compilers[-1].line, shell=True, cwd=folder, check=True)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "demo=octavo_demo,refdev=octavo.testing.refdev")
    before = set(sys.modules)
    for model_type in ("llama", "mistral"):  # the second has a window
        model = make_model(tmp_path / model_type, model_type, seed=1, tokenizer=False)
        assert answers(model, "demo", require_native=("attention", "linear")) == answers(model, "refdev")
    for module in set(sys.modules) - before:
        if module.partition(".")[0] == "octavo_demo":
            del sys.modules[module]


def answers(folder: Path, platform: str, **settings: Any) -> list[list[int]]:
    base: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kv_blocks": 32, "skip_tokenizer_init": True}
    with LLM(str(folder), platform=platform, **base | settings) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_a_printed_line_fits_what_the_page_shows_and_no_other() -> None:
    assert fits("demo ... ready ...", "demo  octavo-demo  0.1.0  ready  a device")
    assert fits("demo ... ready ...", "demo  x  ready")
    assert not fits("demo ... ready ...", "demo  octavo-demo  0.1.0  absent")
    assert not fits("level silver", "level silver, or nearly")


def test_a_command_that_fails_or_prints_something_else_is_an_error(tmp_path: Path) -> None:
    shell = Shell(tmp_path, dict(os.environ))
    try:
        shell.run(Command("mkdir new; cd new; echo a; echo b", ["a", "b"]))
        assert shell.folder() == tmp_path / "new"
        with pytest.raises(AssertionError, match="did not print 'a' but"):
            shell.run(Command("echo b", ["a"]))
        with pytest.raises(AssertionError, match="failed"):
            shell.run(Command("false", []))
        shell.run(Command("(echo ready; exec sleep 600) &", ["ready"]))
        shell.run(Command("kill $!", []))
        shell.run(Command("(echo ready; exec sleep 600) &", ["ready"]))
        shell.run(Command("kill $!", []))
        shell.run(Command("wait; jobs; echo none", ["none"]))
    finally:
        shell.close()
