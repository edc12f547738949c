"""Parameters arrive as they were sent: to the engine's process, and to further ranks."""

from __future__ import annotations

import numpy as np

from octavo.engine.messages import Submit, decode_inbound, encode
from octavo.parallel.wire import decode_batch, encode_batch
from octavo.plugin.step import Admit, Batch
from octavo.sampling.params import SamplingParams
from octavo.sampling.repetition import RepetitionDetectionParams

PARAMS = SamplingParams(
    temperature=0.3,
    logprobs=2,
    logprobs_mode="processed_logits",
    logprob_token_ids=(4, 9),
    repetition_detection=RepetitionDetectionParams(max_pattern_size=5, min_count=3),
    extra_args={"a": {"ids": [1, 2], "on": True, "share": 0.5, "name": "x", "none": None}, "b": -(2**63)},
    skip_reading_prefix_cache=True,
    early_stopping="never",
    logit_bias={3: -1.5},
)


def test_to_the_engine() -> None:
    sent = Submit(handle=7, client=0, tokens=b"\1\0\0\0", params=PARAMS, max_tokens=3, seed=1, leader=6)
    assert decode_inbound(encode(sent)) == sent


def test_to_further_ranks() -> None:
    one = np.ones(1, np.int32)
    admit = Admit(row=0, token_ids=one, num_prompt_tokens=1, params=PARAMS, seed=1)
    batch = Batch(step=1, rows=one, starts=one, counts=one, samples=np.ones(1, np.bool_), admits=[admit])
    (arrived,) = decode_batch(encode_batch(batch)).admits
    assert arrived.params == PARAMS
