"""Engines in processes of their own: a model divided over devices of XLA:CPU, and programs kept for another start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.testing.tiny import make_model

pytestmark = pytest.mark.timeout(1200)


def run(model: Path, *, dump: Path | None = None, **options: str) -> dict[str, Any]:
    """What `one_engine.py` found."""
    flags = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"} if dump else {}
    script = str(Path(__file__).with_name("one_engine.py"))
    command = [sys.executable, script, str(model), json.dumps(options)]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Start(NamedTuple):
    """An engine on one chip: its model, the folder that it keeps its programs in, and what was found."""

    model: Path
    programs: Path
    found: dict[str, Any]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Start:
    model = make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=False)
    programs = tmp_path_factory.mktemp("programs")
    return Start(model, programs, run(model, cache_dir=str(programs)))


def test_two_and_four_chips_give_the_tokens_of_one_and_hold_a_part_each(one: Start, tmp_path: Path) -> None:
    for chips in (2, 4):
        dump = tmp_path / f"dump{chips}"
        found = run(one.model, dump=dump, chips=str(chips))
        assert found["tokens"] == one.found["tokens"]
        assert found["compiled"][1] == 0, "nothing is compiled behind the first request"
        parts = found["divided"]
        assert all(whole != part for whole, part in parts)
        # The tiny model: qkv [128, 64], o [64, 64] of 4 heads of 16; 2 KV heads, which 4 chips do not divide.
        assert [[128, 64], [128 // chips, 64]] in parts
        assert [[64, 64], [64, 64 // chips]] in parts
        caches = [part for whole, part in parts if whole == [40, 2, 16, 16]]
        assert all(part == [40, 1, 16, 16] for part in caches)
        assert bool(caches) == (chips == 2)
        summing = [path.read_text() for path in dump.glob("*after_optimizations.txt")]
        summing = [text for text in summing if "all-reduce" in text]
        loops = [part for text in summing for part in text.split("\n\n") if "Body" in part.lstrip().split("(")[0]]
        assert len(loops) == 4, "of 2 steps, 2 layers each, walk contexts"
        assert not any(word in part for part in loops for word in ("all-", "collective-")), "each chip walks its heads'"
        donating = [text for text in summing if "input_output_alias={ {" in text.splitlines()[0]]
        assert len(donating) >= 2, "each of the two steps adds partial sums over the chips and overwrites the caches"


def test_programs_are_written_to_the_folder_and_a_second_start_with_it_serves(one: Start) -> None:
    assert len(list(one.programs.iterdir())) == one.found["compiled"][0] > 0
    assert run(one.model, cache_dir=str(one.programs))["tokens"] == one.found["tokens"]
