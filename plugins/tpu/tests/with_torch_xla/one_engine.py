"""One engine in a process of its own: torch_xla is told once a process how many devices there are, and of its cache.

    python one_engine.py MODEL '{"chips": "2"}'      prints what came of it, as JSON

tokens: of fixed prompts. compiled: programs made before the first request, and since. divided: of each weight and cache
that the model holds in parts, whole shape and shape of a part.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "num_kv_blocks": 40,
    "block_size": 16,
    "skip_tokenizer_init": True,
}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 17, 1)]


def main(model: str, options: dict[str, str]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["OCTAVO_EXTRA_PLATFORMS"] = "tpu_xla_on_cpu=torch_xla_cpu"
    from octavo import LLM, SamplingParams
    from octavo_tpu import attention

    attention.ROUND_BYTES = 1  # a page a round, so that steps loop over contexts
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    with LLM(model, platform="tpu_xla_on_cpu", platform_options=options, **SETTINGS) as llm:
        before = count("UncachedCompile")
        tokens = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]
        found = {
            "tokens": tokens,
            "compiled": [before, count("UncachedCompile") - before],
            "divided": divided() if "chips" in options else [],
        }
    print(json.dumps(found))


def count(name: str) -> int:
    from torch_xla.debug import metrics

    return metrics.counter_value(name) or 0


def divided() -> list[list[list[int]]]:
    """Whole shape and shape of the first part, of every tensor that lies in parts."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()
    xla = torch_xla._XLAC
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "xla"]  # no fake ones
    apart = [t for t in tensors if t._base is None and "devices=" in xla._get_xla_sharding_spec(t)]
    return [[list(t.shape), list(xla._get_local_shards([t])[0][0][0].shape)] for t in apart]


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
