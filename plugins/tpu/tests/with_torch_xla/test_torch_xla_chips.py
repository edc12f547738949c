"""Engines in processes of their own: a model divided over devices of XLA:CPU, and programs kept for another start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_two_and_four_chips_give_the_tokens_of_one_and_hold_a_part_each(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", tokenizer=False)
    one = run(model)
    for chips in (2, 4):
        dump = tmp_path / f"dump{chips}"
        found = run(model, dump=dump, chips=str(chips))
        assert found["tokens"] == one["tokens"]
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
        donating = [text for text in summing if "input_output_alias={ {" in text.splitlines()[0]]
        assert len(donating) >= 2, "each of the two steps adds partial sums over the chips and overwrites the caches"


def test_programs_are_written_to_the_folder_and_a_second_start_with_it_serves(tmp_path: Path) -> None:
    model, folder = make_model(tmp_path / "model", "llama", tokenizer=False), tmp_path / "programs"
    first = run(model, cache_dir=str(folder))
    assert len(list(folder.iterdir())) == first["compiled"][0] > 0
    assert run(model, cache_dir=str(folder))["tokens"] == first["tokens"]
