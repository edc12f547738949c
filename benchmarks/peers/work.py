"""Writes the seeded work that every engine replays, as token ids in one JSON file.

    python benchmarks/peers/work.py work.json

{"first": request, "short": prompts of 128 tokens, "warm": prompts of 64, "mixes": lists of 64 requests, "long":
prompts of 2,048}; a request is [prompt, number of output tokens]. All prompts are distinct: no prefix cache helps.
Needs Octavo, for the definitions of `octavo.bench.workload`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from octavo.bench.workload import Source

SEED = 20261129
ID_RANGE = (100, 49000)
"""Valid in SmolLM2's vocabulary and clear of its special tokens."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    source = Source(SEED, ids=ID_RANGE)
    mixes = [[[w.prompt, w.num_output] for w in source.mix()] for _ in range(3)]
    work = {
        "first": [source.fixed(128, 1).prompt, 1],
        "short": [source.fixed(128, 1).prompt for _ in range(32)],
        "warm": [source.fixed(64, 1).prompt for _ in range(8)],
        "mixes": mixes,
        "long": [source.fixed(2048, 1).prompt for _ in range(16)],
    }
    Path(sys.argv[1]).write_text(json.dumps(work, separators=(",", ":")))
    for count in (64, 16):
        part = mixes[0][:count]
        print(
            f"{count} requests: {sum(len(p) for p, _ in part)} prompt tokens, {sum(n for _, n in part)} output tokens"
        )


if __name__ == "__main__":
    main()
