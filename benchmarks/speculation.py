"""What speculation gives on text that repeats itself, and what it costs on text that does not.

    OMP_NUM_THREADS=1 python benchmarks/speculation.py [--model FOLDER] [--platform cpu] [--rows 1 4] [--rounds 3]

Engines without drafts and with `ngram` answer the same prompts in turn, greedily. Prints the median over rounds of
tokens a second of the process' own CPU time, so that a busy machine does not count; or, with --wall, of the clock's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from octavo import LLM, SamplingParams

CODE = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth
"""
TASKS = {
    "edit": f"Here is a Python file:\n\n{CODE * 2}\nRepeat the file word for word, with size in place of area.",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args(argv)
    clock: Callable[[], float] = time.perf_counter if options.wall else time.process_time
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    settings = {"platform": options.platform, "max_model_len": 1024, "max_num_seqs": 8, "enable_prefix_caching": False}
    with (
        LLM(options.model, **settings) as plain,
        LLM(options.model, speculative_config=NGRAM, **settings) as drafting,
    ):
        for task, text in TASKS.items():
            for rows in options.rows:
                prompts = [[{"role": "user", "content": f"{text} ({row})"}] for row in range(rows)]
                speeds: dict[str, list[float]] = {"plain": [], "ngram": []}
                answers = {}
                before = drafting.stats
                for _ in range(options.rounds):
                    for name, llm in (("plain", plain), ("ngram", drafting)):
                        began = clock()
                        outputs = llm.chat(prompts, params, use_tqdm=False)
                        speeds[name].append(rows * options.tokens / (clock() - began))
                        answers[name] = [output.outputs[0].token_ids for output in outputs]
                after = drafting.stats
                guessed = after.spec_draft_tokens - before.spec_draft_tokens
                right = sum(after.spec_accepted) - sum(before.spec_accepted)
                off, on = (statistics.median(speeds[name]) for name in ("plain", "ngram"))
                equal = sum(a == b for a, b in zip(answers["plain"], answers["ngram"], strict=True))
                print(
                    f"{task:5}  rows {rows:2}  plain {off:7.1f}  ngram {on:7.1f} tok/s  ratio {on / off:.2f}  "
                    f"steps {(after.steps - before.steps) / options.rounds:.0f} for {options.tokens} tokens  "
                    f"right {right} of {guessed}  equal answers {equal} of {rows}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
