"""Octavo beside other engines on the same seeded work: runs each in turn with its own Python, prints the ratios.

    python benchmarks/peers/compare.py --cache FOLDER [--python vllm=/venv/bin/python ...] [--only NAME ...]
                                       [--reuse] [--tests ABCD] [run.py's options]

An engine that has no --python here runs with this one, if it can be imported. Results are JSON files in FOLDER/results;
--reuse takes those that are there instead of measuring again. The README beside this file prepares the FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODULE_OF = {"octavo": "octavo", "vllm": "vllm", "openvino": "openvino_genai", "llamacpp": "xllamacpp"}


@dataclass(frozen=True)
class Contest:
    """One comparison: contestants' model files by engine, and how many requests test B has."""

    files: Mapping[str, str]
    requests: int = 64


CONTESTS = {
    "smollm2-bf16": Contest(
        {
            "octavo": "smollm2",
            "vllm": "smollm2",
            "openvino": "smollm2-openvino",
            "llamacpp": "smollm2-bf16.gguf",
            "transformers": "smollm2",
        }
    ),
    "smollm2-q8_0": Contest({"octavo": "smollm2-q8_0.gguf", "llamacpp": "smollm2-q8_0.gguf"}),
    "smollm2-q4_1": Contest({"octavo": "smollm2-q4_1.gguf", "llamacpp": "smollm2-q4_1.gguf"}),
    "llama-1b-bf16": Contest(
        {
            "octavo": "llama-1b",
            "vllm": "llama-1b",
            "openvino": "llama-1b-openvino",
            "llamacpp": "llama-1b-bf16.gguf",
            "transformers": "llama-1b",
        },
        requests=16,
    ),
    "llama-1b-q8_0": Contest({"octavo": "llama-1b-q8_0.gguf", "llamacpp": "llama-1b-q8_0.gguf"}, requests=16),
}
FIGURES = {
    "decode_tok_s": ("decode, tok/s", "higher"),
    "ttft_128_ms": ("first token of 128, ms", "lower"),
    "mix_output_tok_s": ("mix, output tok/s", "higher"),
    "prefill_2048_tok_s": ("prefill of 2,048, tok/s", "higher"),
    "start_s": ("start to first token, s", "lower"),
    "peak_resident_mib": ("peak resident, MiB", "lower"),
}
"""Result field -> (its row, which is better)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="the folder with work.json and the models")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--only", nargs="*", default=list(CONTESTS), help="contests, or CONTEST:ENGINE")
    parser.add_argument("--reuse", action="store_true", help="measure only what has no result yet")
    parser.add_argument("--tests", default="ABCD")
    args, passed = parser.parse_known_args()
    pythons = dict(text.split("=", 1) for text in args.python)
    results = args.cache / "results"
    results.mkdir(exist_ok=True)
    for name, contest in CONTESTS.items():
        for engine, file in contest.files.items():
            out = results / f"{name}.{engine}.json"
            chosen = name in args.only or f"{name}:{engine}" in args.only
            if chosen and not (args.reuse and out.exists()):
                command = [pythons.get(engine, sys.executable), str(HERE / "run.py"), engine, "--out", str(out)]
                command += ["--model", str(args.cache / file), "--work", str(args.cache / "work.json")]
                command += ["--requests", str(contest.requests), "--tests", args.tests, *passed]
                run(command, engine, args.cache / file)
        print(table(name, contest, results), flush=True)


def run(command: list[str], engine: str, model: Path) -> None:
    """One engine in a process of its own; says so and goes on when it cannot run."""
    if not model.exists():
        print(f"{engine}: no {model}: left out", file=sys.stderr)
        return
    module = MODULE_OF.get(engine, engine)
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if "--server" not in command and subprocess.run([command[0], "-c", find], check=False).returncode:
        print(f"{engine}: {command[0]} has no {module}: left out", file=sys.stderr)
        return
    done = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False)
    if done.returncode:
        print(f"{engine}: ended with {done.returncode}: left out", file=sys.stderr)


def table(name: str, contest: Contest, results: Path) -> str:
    """Markdown: a row a figure, a column an engine; the last is Octavo against the best of the others, above 1 where
    Octavo is better."""
    found: dict[str, dict[str, Any]] = {}
    for engine in contest.files:
        if (file := results / f"{name}.{engine}.json").exists():
            found[engine] = json.loads(file.read_text())
    if not found:
        return f"{name}: no results\n"
    lines = [f"## {name}", "", f"| | {' | '.join(found)} | octavo / best rival |", "|---" * (len(found) + 2) + "|"]
    for field_name, (title, better) in FIGURES.items():
        values = {engine: result.get(field_name) for engine, result in found.items()}
        if not any(values.values()):
            continue
        cells = ["" if value is None else f"{value:,.4g}" for value in values.values()]
        rivals = [value for engine, value in values.items() if engine != "octavo" and value]
        ratio = ""
        if (own := values.get("octavo")) and rivals:
            ratio = f"{own / max(rivals) if better == 'higher' else min(rivals) / own:.2f}"
        lines.append(f"| {title} | {' | '.join(cells)} | {ratio} |")
    others = {engine: max(shares(result), default=0.0) for engine, result in found.items()}
    lines += ["", "Most that others took of the machine in a sample: "]
    lines[-1] += ", ".join(f"{engine} {share:.1%}" for engine, share in others.items()) + ". Versions: "
    lines[-1] += ", ".join(f"{engine} {result['version']}" for engine, result in found.items()) + "."
    return "\n".join(lines) + "\n"


def shares(result: dict[str, Any]) -> list[float]:
    tests = result["samples"].values()
    return [sample["foreign"] for found in tests for samples in found.values() for sample in samples]


if __name__ == "__main__":
    main()
