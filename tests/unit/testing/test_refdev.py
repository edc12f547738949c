"""The fake platform behaves like a capturing device with static shapes, and the engine uses it as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.plugin import BatchKey, BatchLimits
from octavo.testing.refdev_device import CaptureRunner, RefDevice, RefEvent
from octavo.testing.tiny import make_model

KEY = BatchKey(num_tokens=1, num_seqs=1)


def test_a_replay_has_the_constants_of_the_recording_baked_in() -> None:
    x, factor = torch.ones(3), [2.0]
    runner = CaptureRunner()
    handle = runner.prepare(KEY, lambda: x * factor[0])
    factor[0] = 100.0
    x.fill_(5.0)
    assert runner.run(handle).tolist() == [10.0] * 3


def test_a_replay_writes_to_the_addresses_of_the_recording() -> None:
    x = torch.ones(4, 4)
    runner = CaptureRunner()
    handle = runner.prepare(KEY, lambda: (x.t().reshape(-1), (x + 1).sum()))
    first = runner.run(handle)
    x.fill_(3.0)
    again = runner.run(handle)
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in first]
    assert again[0].tolist() == [3.0] * 16
    assert again[1].item() == 64.0


def test_a_replay_repeats_in_place_effects() -> None:
    counter = torch.zeros(1)
    runner = CaptureRunner()
    handle = runner.prepare(KEY, lambda: counter.add_(1))
    counter.zero_()
    for _ in range(3):
        runner.run(handle)
    assert counter.item() == 3


@pytest.mark.parametrize(
    "step",
    [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: torch.unique(x)],
    ids=["item", "mask", "nonzero", "unique"],
)
def test_what_a_device_cannot_capture_is_refused(step: Any) -> None:
    x = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        CaptureRunner().prepare(KEY, lambda: step(x))


def test_integer_indices_can_be_captured() -> None:
    x, index = torch.arange(6.0), torch.tensor([0, 1])
    runner = CaptureRunner()
    handle = runner.prepare(KEY, lambda: x[index])
    index.copy_(torch.tensor([5, 2]))
    assert runner.run(handle).tolist() == [5.0, 2.0]


def test_keys_cover_the_largest_decode_batch_and_one_mixed_shape() -> None:
    keys = CaptureRunner().keys(BatchLimits(max_num_tokens=64, max_num_seqs=6, max_model_len=8))
    assert [key.num_seqs for key in keys if key.max_q_len == 1] == [1, 2, 4, 6]
    assert [(key.num_tokens, key.num_seqs) for key in keys if key.max_q_len == 0] == [(32, 4)]


def test_waiting_for_an_event_that_was_not_recorded_is_an_error() -> None:
    event, device = RefEvent(), RefDevice(0, memory=1 << 20)
    assert not event.query()
    with pytest.raises(RuntimeError, match="never recorded"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="never recorded"):
        device.stream().wait_event(event)
    event.record()
    device.stream().wait_event(event)


def test_the_engine_replays_its_decode_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
    folder = make_model(tmp_path, "llama", tokenizer=False)
    replayed: list[object] = []
    run = CaptureRunner.run

    def counting(self: CaptureRunner, handle: Any) -> Any:
        replayed.append(handle)
        return run(self, handle)

    monkeypatch.setattr(CaptureRunner, "run", counting)
    settings: dict[str, Any] = {"max_num_seqs": 2, "num_kv_blocks": 20, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), platform="refdev", max_model_len=64, **settings) as llm:
        warm_ups = len(replayed)
        captured = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert len(replayed) - warm_ups >= 7
    with LLM(str(folder), platform="refdev", max_model_len=64, enforce_eager=True, **settings) as llm:
        assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids == captured
