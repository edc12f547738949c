"""The work of the comparisons on SmolLM2: the definitions of `octavo.bench.workload` with this seed and these ids."""

from __future__ import annotations

from functools import partial

from octavo.bench import workload
from octavo.bench.workload import Work

SEED = 20261129
ID_RANGE = (100, 49000)
"""Valid in SmolLM2's vocabulary and clear of its special tokens."""

Source = partial(workload.Source, seed=SEED, ids=ID_RANGE)

__all__ = ["ID_RANGE", "SEED", "Source", "Work"]
