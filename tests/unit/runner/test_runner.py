"""Steps eager or recorded, run ahead or not: the same tokens, and nothing written behind an answer's end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from octavo.plugin import BatchKey, MemInfo
from octavo.plugin.step import Admit, Batch, BlockUpdate
from octavo.runner.inputs import MAX_STOPS
from octavo.runner.runner import ModelRunner
from octavo.testing.refdev_device import RefDevice
from octavo.testing.tiny import make_model

sys.path.insert(0, str(Path(__file__).parent))
import triton_platform

PLATFORMS = ("refdev", "interpreted")
PROMPTS = [[5 + i, 40, 7, 60 + i, 9][: 1 + i] * (1 + i % 3) for i in range(6)]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 40,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_model(
            tmp_path_factory.mktemp(name) / "model", name, seed=4, tokenizer=False, max_position_embeddings=1024
        )
        for name in ("llama", "gemma2")
    }


@pytest.fixture(autouse=True)
def platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = "refdev=octavo.testing.refdev,interpreted=triton_platform,cpu=octavo_cpu"
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", extra)


def generate(folder: Path, params: list[SamplingParams], **settings: Any) -> list[RequestOutput]:
    with LLM(str(folder), **(SETTINGS | settings)) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def parameters(stops: list[int]) -> list[SamplingParams]:
    """Plain and rare ones; each stops in its middle, by one of `stops` or by its length."""
    shared: dict[str, Any] = {"stop_token_ids": stops, "max_tokens": 14, "detokenize": False}
    return [
        SamplingParams(temperature=0.0, **shared),
        SamplingParams(temperature=0.9, seed=1, **(shared | {"max_tokens": 3})),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, **shared),
        SamplingParams(temperature=0.8, seed=2, top_p=0.9, top_k=40, logprobs=2, **shared),
        SamplingParams(temperature=0.8, seed=4, top_k=9, logprobs=2, logprobs_mode="processed_logits", **shared),
        SamplingParams(temperature=0.0, min_tokens=6, logprob_token_ids=(7, 9), **shared),
    ]


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    found = []
    for output in outputs:
        for entry in output.outputs[0].logprobs or ():
            found += [one.logprob for one in entry.values()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_recording_and_running_ahead_change_no_answer(folders: dict[str, Path], platform: str, model: str) -> None:
    folder = folders[model]
    free = generate(folder, [SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)] * 6, platform="cpu")
    stops = sorted({o.outputs[0].token_ids[5 + i] for i, o in enumerate(free)})
    params = parameters(stops)
    plain = generate(folder, params, platform=platform, enforce_eager=True, run_ahead=0)
    assert {o.outputs[0].finish_reason for o in plain} == {"stop", "length"}
    assert 0 < min(len(o.outputs[0].token_ids) for o in plain) < 14
    for settings in ({"run_ahead": 0}, {"run_ahead": 1}, {"run_ahead": 1, "enforce_eager": True}):
        other = generate(folder, params, platform=platform, **settings)
        assert told(other) == told(plain), settings
        assert logprobs(other) == pytest.approx(logprobs(plain), abs=1e-4)


def runners(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """The runners that engines make from now on; the last one serves."""
    made: list[ModelRunner] = []
    init = ModelRunner.__post_init__

    def noting(self: ModelRunner) -> None:
        init(self)
        made.append(self)

    monkeypatch.setattr(ModelRunner, "__post_init__", noting)
    return made


def step(number: int, rows: list[int], starts: list[int], counts: list[int], **parts: Any) -> Batch:
    ints = (np.array(part, np.int32) for part in (rows, starts, counts))
    batch = dict(zip(("rows", "starts", "counts"), ints, strict=True))
    return Batch(step=number, samples=np.ones(len(rows), np.bool_), **batch, **parts)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("eager", [True, False])
def test_a_step_behind_a_rows_end_touches_no_block_of_it(
    folders: dict[str, Path], platform: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runners(monkeypatch)
    with LLM(str(folders["llama"]), platform=platform, enforce_eager=eager, **SETTINGS):
        runner = made[-1]
        params = SamplingParams(temperature=0.0)
        tokens = np.arange(20, 24, dtype=np.int32)
        blocks = BlockUpdate(
            rows=np.array([0, 1], np.int32), indices=np.zeros(2, np.int32), blocks=np.array([3, 4], np.int32)
        )

        def admit(row: int, stop_ids: tuple[int, ...], limit: int) -> Admit:
            shared: dict[str, Any] = {"token_ids": tokens, "num_prompt_tokens": 4, "params": params, "seed": 0}
            return Admit(row=row, stop_ids=stop_ids, limit=limit, **shared)

        def run(batch: Batch) -> list[int]:
            runner.launch(batch)
            return runner.collect().tokens[:, 0].tolist()

        first = run(step(1, [0], [0], [4], admits=[admit(0, (), 99)], blocks=[blocks]))
        # Both rows sample the same token; it stops row 0 only. Row 1 goes on.
        admits = [admit(0, (first[0],), 99), admit(1, (), 99)]
        assert run(step(2, [0, 1], [0, 0], [4, 4], admits=admits, released=[0])) == first * 2
        written = [view.k[3].clone() for view in runner.kv]
        second = run(step(3, [0, 1], [4, 4], [1, 1]))
        assert all(torch.equal(view.k[3], before) for view, before in zip(runner.kv, written, strict=True))
        assert runner.table.tokens[0, 5] == 0, "and no token behind the last one"
        assert runner.table.tokens[1, 5] == second[1]
        assert any(view.k[4, :, 4].any() for view in runner.kv)
        # The row is taken by another: it starts anew.
        assert run(step(4, [0], [0], [4], admits=[admit(0, (), 5)], released=[0])) == first
        assert runner.table.ended[:2].tolist() == [1, 0], "its length ends it this time"


def test_shapes_of_long_steps_are_recorded_behind_their_first_use(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runners(monkeypatch)
    settings = SETTINGS | {"max_model_len": 700, "max_num_batched_tokens": 700, "num_kv_blocks": 200}
    prompt = [7, 9, 11] * 190
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    with LLM(str(folders["llama"]), platform="interpreted", enable_prefix_caching=False, **settings) as llm:
        graph = made[-1].graph
        assert isinstance(graph, triton_platform.RunsAsRecorded)
        at_start = [(key.num_tokens, key.max_q_len) for key in graph.prepared]
        assert at_start == [(64, 0), (16, 0), (4, 1), (4, 1), (2, 1), (1, 1)], "the largest first"
        # The step's own token ends the row: were the step run twice, its second run would give another one.
        stop = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
        assert [key.num_tokens for key in graph.prepared[len(at_start) :]] == [600]
        again = SamplingParams(temperature=0.0, max_tokens=3, stop_token_ids=stop[:1], detokenize=False)
        assert llm.generate([prompt], again, use_tqdm=False)[0].outputs[0].token_ids == stop[:1]
        assert [key.num_tokens for key in graph.prepared[len(at_start) :]] == [600], "once"


def test_a_row_may_have_more_stop_tokens_than_the_device_knows(folders: dict[str, Path]) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    free = generate(folders["llama"], [endless] * 6, platform="cpu")
    stops = [t for t in range(300, 300 + 2 * MAX_STOPS) if t not in free[0].outputs[0].token_ids]
    stops.append(free[0].outputs[0].token_ids[4])
    params = SamplingParams(temperature=0.0, max_tokens=14, stop_token_ids=stops, detokenize=False)
    for run_ahead in (0, 1):
        output = generate(folders["llama"], [params] * 6, platform="refdev", run_ahead=run_ahead)[0]
        assert output.outputs[0].stop_reason in stops
        assert output.outputs[0].token_ids == free[0].outputs[0].token_ids[: len(output.outputs[0].token_ids)]


def test_no_host_memory_is_pinned_once_steps_repeat(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = runners(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    with LLM(str(folders["llama"]), platform="refdev", run_ahead=1, **SETTINGS) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
        device, idle = made[-1].ctx.device, len(made[-1].idle)
        assert idle == 2, "one for each step in flight"
        monkeypatch.setattr(device, "pin", lambda t: pytest.fail("memory is pinned on the step path"))
        llm.generate(PROMPTS, params, use_tqdm=False)
        assert len(made[-1].idle) == idle


def test_memory_of_recorded_steps_is_measured_on_the_largest_before_kv_is_taken(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = runners(monkeypatch)
    settings = {name: value for name, value in SETTINGS.items() if name != "num_kv_blocks"}
    taken = [0]

    def memory(self: RefDevice) -> MemInfo:
        return MemInfo(total=1 << 30, free=(1 << 30) - taken[0], non_torch=taken[0] // 2)

    prepare = triton_platform.RunsAsRecorded.prepare

    def taking(self: triton_platform.RunsAsRecorded, key: BatchKey, fn: Any) -> Any:
        taken[0] += 8 << 20
        return prepare(self, key, fn)

    monkeypatch.setattr(RefDevice, "memory", memory)
    monkeypatch.setattr(triton_platform.RunsAsRecorded, "prepare", taking)
    with (
        caplog.at_level("INFO", logger="octavo.worker"),
        LLM(str(folders["llama"]), platform="interpreted", gpu_memory_utilization=0.5, **settings),
    ):
        _, trial, serving = made
        assert isinstance(trial.graph, triton_platform.RunsAsRecorded)
        assert [(key.num_tokens, key.max_q_len) for key in trial.graph.prepared] == [(600, 0), (4, 1)]
        assert trial.graph is not serving.graph
        # 16 MiB for the two, and 4 MiB of the driver's for each of the other five shapes.
        assert "recorded steps 0.04" in caplog.text
        assert len(caplog.messages) == 1
